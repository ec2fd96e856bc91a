"""Products of experts' few rows with their matrices: a program per expert (or row) and block of columns.

A program reads its part of a matrix once for up to ``BLOCK_M`` rows, and again, mostly from the cache, for every
further ``BLOCK_M``. Where rows end is read on the device; a program without rows has nothing to loop over. What the
products are stands in ``reference.py``.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import torch
import triton.language as tl
from torch import Tensor

from hypic_kernels.experts.layout import Kind, Layout
from hypic_kernels.launch import Launch, jit


@jit
def _run_of(
    ends: tl.tensor, group: tl.tensor, E: tl.tensor, BY_ROW: tl.constexpr, BLOCK_E: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """An expert, and where its rows start and end; a row that is not its expert's first has none."""
    expert = group
    if BY_ROW:
        experts = tl.arange(0, BLOCK_E)
        known = tl.load(ends + experts, mask=experts < E, other=2147483647)
        expert = tl.sum((known <= group).to(tl.int32), axis=0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert, mask=expert < E, other=0)
    if BY_ROW:
        end = tl.where(start == group, end, start)
    return expert, start, end


@jit
def _tile(start: tl.tensor, mask: tl.tensor, across: tl.tensor, K: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Numbers ``across`` the sum of the rows that begin at ``start``; zero where there are none."""
    if not EVEN:
        mask = mask & (across < K)
    return tl.load(start + across, mask=mask, other=0.0)


@jit
def _multiply(
    x: tl.tensor,
    tokens: tl.tensor,
    weight: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    x_pitch: tl.tensor,
    K: tl.tensor,
    N: tl.tensor,
    E: tl.tensor,
    KIND: tl.constexpr,
    INDEXED: tl.constexpr,
    BY_ROW: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < N
    expert, start, end = _run_of(ends, tl.program_id(1), E, BY_ROW, BLOCK_E)
    # Columns that there are not read the first, and are not written.
    column = tl.where(is_column, columns, 0).to(tl.int64)[None, :] * K
    number = expert.to(tl.int64) * (2 if KIND == "silu" else 1)
    matrix, beside = weight + number * K * N + column, weight + (number + 1) * K * N + column
    everywhere = tl.full((1, BLOCK_N), True, tl.int1)
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        is_row = (rows < end)[:, None]
        source = rows
        if INDEXED:
            source = tl.load(tokens + rows, mask=rows < end, other=0)
        given = x + source.to(tl.int64)[:, None] * x_pitch
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            across = k + tl.arange(0, BLOCK_K)
            left = _tile(given, is_row, across[None, :], K, EVEN)
            right = _tile(matrix, everywhere, across[:, None], K, EVEN)
            total = tl.dot(left, right, acc=total, input_precision=PRECISION)
            if KIND == "silu":
                other = _tile(beside, everywhere, across[:, None], K, EVEN)
                up = tl.dot(left, other, acc=up, input_precision=PRECISION)
        if KIND == "silu":
            total *= tl.sigmoid(total) * up
        if KIND == "relu2":
            # Not a maximum: NaN stays NaN.
            total = tl.where(total < 0, 0.0, total)
            total *= total
        target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=is_row & is_column[None, :])


def multiply(
    x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None, kind: Kind, out: Tensor, layout: Layout
) -> Launch:
    """``x [R, K]``, or ``[N, K]`` with ``tokens [R]``; ``weight [E, columns, K]``; fills ``out [R, columns]``, of a
    gated product half as many columns."""
    num_experts, _, width = weight.shape
    config, (num_rows, num_columns) = layout.config, out.shape
    arguments = (x, x if tokens is None else tokens, weight, ends, out, x.stride(0), width, num_columns, num_experts)
    constants = {
        "KIND": kind, "INDEXED": tokens is not None, "BY_ROW": layout.by_row, "EVEN": width % config.block_k == 0,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee", "BLOCK_E": 1 << (num_experts - 1).bit_length(),
        **config.blocks,
    }  # fmt: skip
    grid = (-(-num_columns // config.block_n), num_rows if layout.by_row else num_experts)
    return Launch(_multiply, grid, arguments, constants, config.num_warps)
