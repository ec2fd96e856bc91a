"""Chunks of rows before their states are known, in one launch: running sums of ``g``, and ``w`` and ``u``.

With ``e_i = exp(g_1 + ... + g_i)`` within a chunk, ``A_ij = beta_i D_ij (k_i . k_j)`` below the diagonal and ``D_ij``
the decay from j to i, ``w = (I + A)^-1 diag(beta e) k`` and ``u = (I + A)^-1 diag(beta) v``. A program takes a chunk
and a value head, in halves: with ``L`` what couples the lower half to the upper and ``X`` the inverse of each half,

    w_upper = X_upper (beta e k)_upper        w_lower = X_lower ((beta e k)_lower - L w_upper)

so the inverse of the whole is never made. Products round their operands to the type of k, as fla's pieces do, whose
place this takes; v is read where it lies.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import math

import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import padded
from hypic_kernels.delta.triton import _inverse
from hypic_kernels.launch import Launch, jit, jit_for_any
from hypic_kernels.rows import CHUNK, Rows

HALF = CHUNK // 2
LEVELS = 5
BLOCK = 64
LOG2_E = 1 / math.log(2)


@jit
def _within(gate: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """``D_ij`` below the diagonal, anything elsewhere; what remains of each token at the end."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    spread = tl.where(rows > columns, gate[:, None], 0.0)
    return tl.exp(tl.cumsum(spread, axis=0)), tl.exp(tl.sum(spread, axis=0))


@jit
def _put(
    x: tl.tensor,
    x_upper: tl.tensor,
    x_lower: tl.tensor,
    scale_upper: tl.tensor,
    scale_lower: tl.tensor,
    real_upper: tl.tensor,
    real_lower: tl.tensor,
    has_upper: tl.tensor,
    has_lower: tl.tensor,
    upper: tl.tensor,
    lower: tl.tensor,
    corner: tl.tensor,
    out: tl.tensor,
    out_upper: tl.tensor,
    out_lower: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """``(I + A)^-1`` times the scaled rows of x, block of columns by block; rows that x does not have are zero."""
    kind = out.dtype.element_ty
    for start in tl.range(0, SIZE, BLOCK, num_stages=1):
        columns = (start + tl.arange(0, BLOCK))[None, :]
        in_upper, in_lower = real_upper[:, None] & (columns < SIZE), real_lower[:, None] & (columns < SIZE)
        first = tl.load(x + x_upper[:, None] + columns, mask=in_upper & has_upper[:, None], other=0.0)
        first = first.to(tl.float32) * scale_upper[:, None]
        first = tl.dot(upper, first.to(kind), input_precision=INNER).to(kind)
        tl.store(out + out_upper[:, None] + columns, first, mask=in_upper)
        then = tl.load(x + x_lower[:, None] + columns, mask=in_lower & has_lower[:, None], other=0.0)
        then = then.to(tl.float32) * scale_lower[:, None]
        then -= tl.dot(corner, first, input_precision=INNER)
        then = tl.dot(lower, then.to(kind), input_precision=INNER)
        tl.store(out + out_lower[:, None] + columns, then.to(kind), mask=in_lower)


@jit_for_any("M")
def _solve(
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    tokens: tl.tensor,
    cu_seqlens: tl.tensor,
    chunk_indices: tl.tensor,
    sums: tl.tensor,
    w: tl.tensor,
    u: tl.tensor,
    M: tl.tensor,
    H: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    log2_e: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    row, number = tl.load(chunk_indices + 2 * chunk), tl.load(chunk_indices + 2 * chunk + 1)
    first, end = tl.load(cu_seqlens + row) + number * 2 * HALF, tl.load(cu_seqlens + row + 1)
    places = first + tl.arange(0, HALF)
    real, l_real = places < end, places + HALF < end
    place, l_place = places.to(tl.int64), places.to(tl.int64) + HALF
    gate = tl.load(g + place * H + head, mask=real, other=0.0)
    l_gate = tl.load(g + l_place * H + head, mask=l_real, other=0.0)
    strength = tl.load(beta + place * H + head, mask=real, other=0.0)
    l_strength = tl.load(beta + l_place * H + head, mask=l_real, other=0.0)
    sum, l_sum = tl.cumsum(gate, axis=0), tl.cumsum(l_gate, axis=0)
    total = tl.sum(gate, axis=0)
    tl.store(sums + place * H + head, sum * log2_e, mask=real)
    tl.store(sums + l_place * H + head, (total + l_sum) * log2_e, mask=l_real)

    key_heads = H // GROUP
    k_upper, k_lower = (place * key_heads + head // GROUP) * K, (l_place * key_heads + head // GROUP) * K
    upper, lower = tl.zeros((HALF, HALF), tl.float32), tl.zeros((HALF, HALF), tl.float32)
    corner = tl.zeros((HALF, HALF), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        channels = (start + tl.arange(0, BLOCK_K))[None, :]
        tile = tl.load(k + k_upper[:, None] + channels, mask=real[:, None] & (channels < K), other=0.0)
        l_tile = tl.load(k + k_lower[:, None] + channels, mask=l_real[:, None] & (channels < K), other=0.0)
        upper = tl.dot(tile, tl.trans(tile), acc=upper, input_precision=INNER)
        lower = tl.dot(l_tile, tl.trans(l_tile), acc=lower, input_precision=INNER)
        corner = tl.dot(l_tile, tl.trans(tile), acc=corner, input_precision=INNER)
    is_below = tl.arange(0, HALF)[:, None] > tl.arange(0, HALF)[None, :]
    decay, remaining = _within(gate, HALF)
    l_decay, _ = _within(l_gate, HALF)
    upper = _inverse(tl.where(is_below, upper * decay * strength[:, None], 0.0), HALF, LEVELS, INNER)
    lower = _inverse(tl.where(is_below, lower * l_decay * l_strength[:, None], 0.0), HALF, LEVELS, INNER)
    corner *= (l_strength * tl.exp(l_sum))[:, None] * remaining[None, :]

    kind = k.dtype.element_ty
    upper, lower, corner = upper.to(kind), lower.to(kind), corner.to(kind)
    token = tl.load(tokens + places, mask=real, other=-1).to(tl.int64)
    l_token = tl.load(tokens + places + HALF, mask=l_real, other=-1).to(tl.int64)
    _put(
        v, token * v_token + head * v_head, l_token * v_token + head * v_head, strength, l_strength, real, l_real,
        token >= 0, l_token >= 0, upper, lower, corner, u, (place * H + head) * V, (l_place * H + head) * V, V,
        BLOCK_V, INNER,
    )  # fmt: skip
    _put(
        k, k_upper, k_lower, strength * tl.exp(sum), l_strength * tl.exp(total + l_sum), real, l_real, real,
        l_real, upper, lower, corner, w, (place * H + head) * K, (l_place * H + head) * K, K, BLOCK_K, INNER,
    )  # fmt: skip


def solve(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, sums: Tensor, w: Tensor, u: Tensor, inner: str = "tf32"
) -> Launch:
    """Of ``k [1, n, Hk, K]``, ``g, beta [1, n, Hv]`` in the order of rows, and ``v [N, Hv, V]`` where it lies, into
    ``sums [1, n, Hv]`` (to base 2), ``w [1, n, Hv, K]`` and ``u [1, n, Hv, V]``; ``inner``: products of the solve."""
    num_heads, value_dim = v.shape[1:]
    key_dim, num_chunks = k.shape[3], rows.chunk_indices.shape[0]
    arguments = (
        k, v, g, beta, rows.tokens, rows.cu_seqlens, rows.chunk_indices, sums, w, u, num_chunks, num_heads,
        *v.stride()[:2], LOG2_E,
    )  # fmt: skip
    constants = {
        "GROUP": num_heads // k.shape[2], "K": key_dim, "V": value_dim, "HALF": HALF, "LEVELS": LEVELS,
        "BLOCK_K": min(BLOCK, padded(key_dim)), "BLOCK_V": min(BLOCK, padded(value_dim)), "INNER": inner,
    }  # fmt: skip
    return Launch(_solve, (num_chunks * num_heads,), arguments, constants, 4)
