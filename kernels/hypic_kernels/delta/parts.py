"""Pieces of the kernels of this package: the gate, the gated norm, and products of a stored with a wide matrix."""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl

from hypic_kernels.launch import jit


@jit
def gates(
    g: tl.tensor,
    beta: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    g_place: tl.tensor,
    beta_place: tl.tensor,
    head: tl.tensor,
    real: tl.tensor,
    beta_scale: tl.tensor,
    RAW: tl.constexpr,
) -> tl.tuple:
    """``g`` and ``beta`` of tokens in fp32; both 0 where there is no token."""
    decay = tl.load(g + g_place, mask=real, other=0.0).to(tl.float32)
    strength = tl.load(beta + beta_place, mask=real, other=0.0).to(tl.float32)
    if RAW:
        x = decay + tl.load(dt_bias + head).to(tl.float32)
        # softplus without overflow; below e^-16 the logarithm gives 0, which e^g could not tell from it.
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        decay = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus
        strength = beta_scale * tl.sigmoid(strength)
    return tl.where(real, decay, 0.0), tl.where(real, strength, 0.0)


@jit
def exact(left: tl.tensor, right: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """``total + left right`` of two stored operands: bf16 numbers multiply exactly, others as ``PRECISION`` says."""
    if PRECISION == "bf16" or PRECISION == "bf16x3":
        total = tl.dot(left, right, acc=total)
    else:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), acc=total, input_precision=PRECISION)
    return total


@jit
def rounded(wide: tl.tensor) -> tl.tensor:
    """To 8 bits, as fp32. By whole numbers: a number that is converted to bf16 and back takes a slow unit of the chip
    (an eighth of the speed of an addition), one that is only converted does not. NaN may become 0, but then its
    difference from what it was is still NaN."""
    return ((wide.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@jit
def halves(wide: tl.tensor) -> tl.tuple:
    """Two bf16 numbers whose sum is the fp32 number up to 2^-17 of it."""
    first = rounded(wide)
    return first.to(tl.bfloat16), (wide - first).to(tl.bfloat16)


@jit
def thirds(wide: tl.tensor) -> tl.tuple:
    """Three bf16 numbers whose sum is the fp32 number: 3 x 8 bits of 24."""
    first = rounded(wide)
    rest = wide - first
    second = rounded(rest)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), (rest - second).to(tl.bfloat16)


@jit
def wide_by_stored(wide: tl.tensor, stored: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """``wide stored``, of fp32 and an operand as stored."""
    if PRECISION == "bf16":
        total = tl.dot(wide.to(tl.bfloat16), stored)
    elif PRECISION == "bf16x3":
        first, second, third = thirds(wide)
        total = tl.dot(third, stored)
        total = tl.dot(second, stored, acc=total)
        total = tl.dot(first, stored, acc=total)
    else:
        total = tl.dot(wide, stored.to(tl.float32), input_precision=PRECISION)
    return total


@jit
def stored_by_wide(stored: tl.tensor, wide: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """``stored wide``, of an operand as stored and fp32."""
    if PRECISION == "bf16":
        total = tl.dot(stored, wide.to(tl.bfloat16))
    elif PRECISION == "bf16x3":
        first, second, third = thirds(wide)
        total = tl.dot(stored, third)
        total = tl.dot(stored, second, acc=total)
        total = tl.dot(stored, first, acc=total)
    else:
        total = tl.dot(stored.to(tl.float32), wide, input_precision=PRECISION)
    return total


@jit
def both_wide(left: tl.tensor, right: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """``total + left right`` of two fp32 operands.

    ``bf16x3`` is spelt out: the compiler's own moves the accumulator to another layout and back for each product.
    """
    if PRECISION == "bf16":
        total = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), acc=total)
    elif PRECISION == "bf16x3":
        first, second = halves(left)
        other_first, other_second = halves(right)
        total = tl.dot(second, other_first, acc=total)
        total = tl.dot(first, other_second, acc=total)
        total = tl.dot(first, other_first, acc=total)
    else:
        total = tl.dot(left, right, acc=total, input_precision=PRECISION)
    return total


@jit
def gated(
    outputs: tl.tensor,
    z: tl.tensor,
    z_place: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    mean: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
) -> tl.tensor:
    """``outputs / sqrt(mean + eps) * weight * silu(z)``."""
    gate = tl.load(z + z_place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < V, other=0.0).to(tl.float32)
    return outputs * tl.rsqrt(mean + eps) * scale * gate * tl.sigmoid(gate)
