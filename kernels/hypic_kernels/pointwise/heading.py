"""Norm and rotation of heads, and norm of groups behind or before a gate, each in one pass over memory.

What they compute stands in ``reference.py``; this file checks no argument: the package does.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.launch import Launch, jit

NUMBERS_AT_ONCE = 2048


@jit
def _part(
    x: tl.tensor,
    weight: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    is_channel: tl.tensor,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
) -> tl.tensor:
    value = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.load(weight + channels, mask=is_channel, other=0.0).to(tl.float32)
        value *= scale + 1.0 if CENTRED else scale
    return value


@jit
def _heads(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    H: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    angle_token: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """``BLOCK_H`` heads of one token. The output is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < H) & (channels < D)
    rows = x + token * x_token + heads * x_head
    value = _part(rows + channels, weight, channels, mask, channels < D, NORM, CENTRED)
    if HALF > 0:
        is_first, is_turned = channels < HALF, channels < 2 * HALF
        partner = tl.where(is_first, channels + HALF, channels - HALF)
        angle = token * angle_token + tl.where(is_first, channels, channels - HALF)
        other = _part(rows + partner, weight, partner, mask & is_turned, is_turned, NORM, CENTRED)
        along = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
        across = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
        value = value * along + tl.where(is_first, -other, other) * across
    if NORM:
        # Of what was loaded: a rotation keeps lengths, a weight does not.
        plain = tl.load(rows + channels, mask=mask, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(plain * plain, axis=1) / D + eps)[:, None]
    target = out + (token * H + heads) * D + channels
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@jit
def _gated_group_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_pitch: tl.tensor,
    gate_pitch: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    GATES_FIRST: tl.constexpr,
) -> None:
    """One group of one row. The output is contiguous."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    mask = within < SIZE
    columns = group * SIZE + within
    value = tl.load(x + row * x_pitch + columns, mask=mask, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_pitch + columns, mask=mask, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened) if SILU else tl.sigmoid(opened)
    if GATES_FIRST:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    value *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if not GATES_FIRST:
        value *= opened
    tl.store(out + row * SIZE * GROUPS + columns, value.to(out.dtype.element_ty), mask=mask)


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def heads(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    is_zero_centred: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    out: Tensor,
) -> Launch:
    """The twin of ``reference.heads`` for ``[N, H, D]``."""
    num_tokens, num_heads, width = x.shape
    block = _padded(width)
    at_once = min(_padded(num_heads), max(1, NUMBERS_AT_ONCE // block))
    arguments = (
        x, x if weight is None else weight, x if cos is None else cos, x if sin is None else sin, out, num_heads,
        *x.stride()[:2], 0 if cos is None else cos.stride(0), eps,
    )  # fmt: skip
    constants = {
        "D": width, "HALF": 0 if cos is None else cos.shape[1], "NORM": weight is not None, "CENTRED": is_zero_centred,
        "BLOCK_H": at_once, "BLOCK_D": block,
    }  # fmt: skip
    grid = (num_tokens, -(-num_heads // at_once))
    return Launch(_heads, grid, arguments, constants, max(1, min(4, at_once * block // 256)))


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, silu: bool, gates_first: bool, out: Tensor
) -> Launch:
    """The twin of ``reference.gated_group_norm`` for ``[N, size]``."""
    size = x.shape[1] // num_groups
    block = _padded(size)
    arguments = (x, gate, weight, out, x.stride(0), gate.stride(0), eps)
    constants = {"SIZE": size, "GROUPS": num_groups, "BLOCK": block, "SILU": silu, "GATES_FIRST": gates_first}
    grid = (x.shape[0], num_groups)
    return Launch(_gated_group_norm, grid, arguments, constants, max(1, min(8, block // 256)))
