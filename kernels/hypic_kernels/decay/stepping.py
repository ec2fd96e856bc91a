"""``step`` as a kernel: one token per row, its state read once and written once, by a program per block of columns."""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.decay.layout import StepConfig, padded
from hypic_kernels.decay.parts import prepared
from hypic_kernels.decay.rule import Rule
from hypic_kernels.decay.triton import _angles
from hypic_kernels.launch import Launch, jit


@jit
def _factor(
    row: tl.tensor, channels: tl.tensor, eps: tl.tensor, K: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr
) -> tl.tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of one row; one without a norm."""
    factor = 1.0
    if NORM:
        x = tl.load(row + channels, mask=channels < K, other=0.0).to(tl.float32)
        if SILU:
            x *= tl.sigmoid(x)
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    return factor


@jit
def _step(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    states: tl.tensor,
    read_slots: tl.tensor,
    write_slots: tl.tensor,
    out: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    angle_token: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    head = program % H
    row = tl.cast(program // H, tl.int64)
    channels, columns = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    real = channels < K
    q_row, k_row = q + row * q_token + (head // GROUP) * q_head, k + row * k_token + (head // GROUP) * k_head
    cos_row, sin_row = cos + row * angle_token, sin + row * angle_token
    q_factor, k_factor = _factor(q_row, channels, eps, K, SILU, NORM), _factor(k_row, channels, eps, K, SILU, NORM)
    asked = prepared(q_row, real, channels, q_factor, q_weight, cos_row, sin_row, K, HALF, SILU, NORM) * scale
    key = prepared(k_row, real, channels, k_factor, k_weight, cos_row, sin_row, K, HALF, SILU, NORM)
    value = tl.load(v + row * v_token + head * v_head + columns, mask=columns < V, other=0.0).to(tl.float32)
    if SILU:
        value *= tl.sigmoid(value)
    read_slot, write_slot = tl.load(read_slots + row), tl.load(write_slots + row)
    inside = real[:, None] & (columns < V)[None, :]
    places = channels[:, None] * V + columns[None, :]
    old = states + (tl.cast(read_slot, tl.int64) * H + head) * K * V
    new = states + (tl.cast(write_slot, tl.int64) * H + head) * K * V
    state = tl.load(old + places, mask=inside & (read_slot >= 0), other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(g + row * g_token + head * g_head).to(tl.float32)) + key[:, None] * value[None, :]
    tl.store(new + places, state.to(states.dtype.element_ty), mask=inside & (write_slot >= 0))
    output = tl.sum(asked[:, None] * state, axis=0)
    tl.store(out + row * out_token + head * out_head + columns, output.to(out.dtype.element_ty), mask=columns < V)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    rule: Rule,
    out: Tensor,
    config: StepConfig,
) -> Launch:
    """The twin of ``reference.step``; writes ``states`` in place and ``out``."""
    num_rows, num_heads, value_dim = v.shape
    cos, sin, angle_token = _angles(rule, g)
    weights = [k if weight is None else weight for weight in (rule.q_weight, rule.k_weight)]
    arguments = (
        q, k, v, g, *weights, cos, sin, states, read_slots, write_slots, out, num_heads, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *g.stride(), angle_token, *out.stride()[:2], rule.eps, rule.scale,
    )  # fmt: skip
    constants = {
        "GROUP": num_heads // k.shape[1], "K": k.shape[2], "V": value_dim, "HALF": rule.num_turned, "SILU": rule.silu,
        "NORM": rule.k_weight is not None, "BLOCK_K": padded(k.shape[2]), "BLOCK_V": config.block_v,
    }  # fmt: skip
    grid = (num_rows * num_heads * -(-value_dim // config.block_v),)
    return Launch(_step, grid, arguments, constants, config.num_warps)
