"""Add and norm, and gate and product, each in one pass over memory. What they compute stands in ``reference.py``."""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.launch import Launch, jit


@jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    x_pitch: tl.tensor,
    residual_pitch: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
) -> None:
    """One row. Outputs are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * x_pitch + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + row * residual_pitch + columns, mask=mask, other=0.0).to(tl.float32)
        # The norm is of what the next layer will read.
        value = value.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * SIZE + columns, value.to(total.dtype.element_ty), mask=mask)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        scale += 1.0
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps) * scale
    tl.store(normed + row * SIZE + columns, value.to(normed.dtype.element_ty), mask=mask)


@jit
def _silu_mul(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_pitch: tl.tensor,
    up_pitch: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row, ``BLOCK`` columns. The output is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    opened = tl.load(gate + row * gate_pitch + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_pitch + columns, mask=mask, other=0.0).to(tl.float32)
    value *= opened * tl.sigmoid(opened)
    tl.store(out + row * SIZE + columns, value.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    is_zero_centred: bool,
    normed: Tensor,
    total: Tensor,
) -> Launch:
    """The twin of ``reference.add_rms_norm`` for ``[N, size]``; without a residual ``total`` is not touched."""
    size, added = x.shape[1], x if residual is None else residual
    block = 1 << (size - 1).bit_length()
    arguments = (x, added, weight, normed, total, x.stride(0), added.stride(0), eps)
    constants = {"SIZE": size, "BLOCK": block, "ADDS": residual is not None, "CENTRED": is_zero_centred}
    return Launch(_add_rms_norm, (x.shape[0],), arguments, constants, max(1, min(8, block // 512)))


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> Launch:
    """The twin of ``reference.silu_mul`` for ``[N, size]``."""
    size = gate.shape[1]
    block = min(1024, 1 << (size - 1).bit_length())
    arguments = (gate, up, out, gate.stride(0), up.stride(0))
    grid = (gate.shape[0], -(-size // block))
    return Launch(_silu_mul, grid, arguments, {"SIZE": size, "BLOCK": block}, 4)
