"""A program per token and few columns of the result, which sums over the whole width. What is computed stands in
``reference.py``.

Programs of one block of columns and different tokens stand side by side, so that its part of the matrix comes from
memory once. No sum is split: every number has one order of addition.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.early import can_start_early, let_next_start, wait_for_last
from hypic_kernels.launch import Launch, jit
from hypic_kernels.matvec.layout import Sizes


@jit
def _product(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_pitch: tl.tensor,
    M: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        let_next_start()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns that there are not read the first, and are not written.
    rows = weight + tl.where(columns < M, columns, 0).to(tl.int64)[:, None] * K
    # The first block is asked for before the row is there.
    ahead = tl.arange(0, BLOCK_K)[None, :]
    found = tl.load(rows + ahead, mask=ahead < K, other=0.0)
    if EARLY:
        wait_for_last()
    total = found.to(tl.float32) * tl.load(x + token * x_pitch + ahead, mask=ahead < K, other=0.0).to(tl.float32)
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        across = k + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            number = tl.load(x + token * x_pitch + across).to(tl.float32)
            total += tl.load(rows + across).to(tl.float32) * number
        else:
            number = tl.load(x + token * x_pitch + across, mask=across < K, other=0.0).to(tl.float32)
            total += tl.load(rows + across, mask=across < K, other=0.0).to(tl.float32) * number
    tl.store(out + token * M + columns, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=columns < M)


@jit
def _normed_product(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    x_pitch: tl.tensor,
    residual_pitch: tl.tensor,
    M: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """The matrix is asked for before the norm needs its sum; the first block of columns writes sum and norm."""
    if EARLY:
        let_next_start()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    across = tl.arange(0, BLOCK_K)[None, :]
    inside = across < K
    rows = weight + tl.where(columns < M, columns, 0).to(tl.int64)[:, None] * K
    matrix = tl.load(rows + across, mask=inside, other=0.0)
    scale = tl.load(norm_weight + across, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_last()
    value = tl.load(x + token * x_pitch + across, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + token * residual_pitch + across, mask=inside, other=0.0).to(tl.float32)
        # The norm is of what the next layer will read.
        value = value.to(total.dtype.element_ty).to(tl.float32)
    if CENTRED:
        scale += 1.0
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / K
    made = (value * tl.rsqrt(mean + eps) * scale).to(normed.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(normed + token * K + across, made, mask=inside)
        if ADDS:
            tl.store(total + token * K + across, value.to(total.dtype.element_ty), mask=inside)
    answer = tl.sum(matrix.to(tl.float32) * made.to(tl.float32), axis=1)
    tl.store(out + token * M + columns, answer.to(out.dtype.element_ty), mask=columns < M)


def product(x: Tensor, weight: Tensor, out: Tensor, sizes: Sizes) -> Launch:
    """Fills ``out [N, M]``."""
    num_columns, width = weight.shape
    constants = {
        "K": width, "BLOCK_N": sizes.block_n, "BLOCK_K": min(sizes.block_k, _padded(width)), "STAGES": sizes.num_stages,
        "EARLY": sizes.early and can_start_early(x.device),
    }  # fmt: skip
    arguments = (x, weight, out, x.stride(0), num_columns)
    return Launch(_product, (len(x), -(-num_columns // sizes.block_n)), arguments, constants, sizes.num_warps)


def normed_product(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    weight: Tensor,
    eps: float,
    is_zero_centred: bool,
    out: Tensor,
    normed: Tensor,
    total: Tensor,
    sizes: Sizes,
) -> Launch:
    """Fills ``out [N, M]``, ``normed [N, K]`` and, with a residual, ``total [N, K]``."""
    (num_columns, width), added = weight.shape, x if residual is None else residual
    arguments = (
        x, added, norm_weight, weight, out, normed, total, x.stride(0), added.stride(0), num_columns, eps,
    )  # fmt: skip
    constants = {
        "K": width, "ADDS": residual is not None, "CENTRED": is_zero_centred, "BLOCK_N": sizes.block_n,
        "BLOCK_K": _padded(width), "EARLY": sizes.early and can_start_early(x.device),
    }  # fmt: skip
    return Launch(_normed_product, (len(x), -(-num_columns // sizes.block_n)), arguments, constants, sizes.num_warps)


def _padded(size: int) -> int:
    return max(2, 1 << (size - 1).bit_length())
