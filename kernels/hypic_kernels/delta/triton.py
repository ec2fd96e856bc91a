"""``lift`` as a kernel: a program per chunk and value head, from tokens where they lie to the chunk's map and readout.

Everything between is ``[C, C]`` and stays on the chip; the maps leave in blocks of columns. What it computes stands in
``reference.py``; the algebra, and why products are arranged so, in README.md. This file checks no argument: the
package's ``lift`` does.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import LiftConfig
from hypic_kernels.delta.parts import exact, gates, stored_by_wide, wide_by_stored
from hypic_kernels.delta.rule import Maps, Precision, Rule
from hypic_kernels.launch import Launch, jit


@jit
def _inverse(lower: tl.tensor, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """``(I + lower)^-1`` for a strictly lower triangular matrix, by blocks of 2, 4, ... rows.

    With the inverses of neighbouring diagonal blocks known, ``[[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]``;
    all corners ``L`` of one size are done in two products.
    """
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0) - tl.where((rows >> 1) == (columns >> 1), lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        is_corner = ((rows >> (level + 1)) == (columns >> (level + 1))) & ((rows >> level) != (columns >> level))
        corner = tl.where(is_corner, lower, 0.0)
        product = tl.dot(corner, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, product, input_precision=PRECISION)
    return inverse


@jit
def _lift(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    chunks: tl.tensor,
    transition: tl.tensor,
    end_state: tl.tensor,
    query: tl.tensor,
    offset: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    beta_scale: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    RAW: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One chunk, one value head. Neighbours share tokens and, where heads are grouped, q and k."""
    program = tl.program_id(0)
    chunk, head = program // H, program % H
    place = tl.cast(program, tl.int64)
    tokens = tl.load(chunks + tl.cast(chunk, tl.int64) * C + tl.arange(0, C))
    real = (tokens >= 0) & (tokens < N)
    token = tl.where(real, tokens, 0).to(tl.int64)
    is_row = real[:, None]
    q_rows = (q + (head // GROUP) * q_head + token * q_token)[:, None]
    k_rows = (k + (head // GROUP) * k_head + token * k_token)[:, None]
    v_rows = (v + head * v_head + token * v_token)[:, None]
    decay, strength = gates(
        g, beta, A_log, dt_bias, token * g_token + head * g_head, token * beta_token + head * beta_head,
        head, real, beta_scale, RAW,
    )  # fmt: skip

    couplings = tl.zeros((C, C), tl.float32)
    scores = tl.zeros((C, C), tl.float32)
    q_squares = tl.zeros((C,), tl.float32)
    k_squares = tl.zeros((C,), tl.float32)
    for start in tl.range(0, K, ROWS, num_stages=STAGES):
        channels = (start + tl.arange(0, ROWS))[None, :]
        inside = is_row & (channels < K)
        q_tile = tl.load(q_rows + channels, mask=inside, other=0.0)
        k_tile = tl.load(k_rows + channels, mask=inside, other=0.0)
        couplings = exact(k_tile, tl.trans(k_tile), couplings, PRECISION)
        scores = exact(q_tile, tl.trans(k_tile), scores, PRECISION)
        if NORMALISE:
            q_wide, k_wide = q_tile.to(tl.float32), k_tile.to(tl.float32)
            q_squares += tl.sum(q_wide * q_wide, axis=1)
            k_squares += tl.sum(k_wide * k_wide, axis=1)
    q_factor = tl.zeros((C,), tl.float32) + scale
    k_factor = tl.zeros((C,), tl.float32) + 1.0
    if NORMALISE:
        q_factor *= tl.rsqrt(q_squares + eps)
        k_factor *= tl.rsqrt(k_squares + eps)

    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    spread = tl.where(rows > columns, decay[:, None], 0.0)
    between = tl.exp(tl.cumsum(spread, axis=0))
    remaining = tl.exp(tl.sum(spread, axis=0))
    growth = tl.exp(tl.cumsum(decay, axis=0))
    total = tl.exp(tl.sum(decay, axis=0))
    lower = tl.where(rows > columns, couplings * between * (strength * k_factor)[:, None] * k_factor[None, :], 0.0)
    scores = tl.where(rows >= columns, scores * between * q_factor[:, None] * k_factor[None, :], 0.0)
    inverse = _inverse(lower, C, LEVELS, INNER)
    seen = tl.dot(scores, inverse, input_precision=INNER)
    from_k = (strength * growth * k_factor)[None, :]
    from_v = strength[None, :]
    into = (remaining * k_factor)[:, None]

    corrections, readouts = inverse * into * from_k, seen * from_k
    q_growth = (q_factor * growth)[:, None]
    for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
        channels = (start + tl.arange(0, COLUMNS))[None, :]
        inside = is_row & (channels < K)
        tile = tl.load(k_rows + channels, mask=inside, other=0.0)
        q_tile = tl.load(q_rows + channels, mask=inside, other=0.0).to(tl.float32)
        asked = q_tile * q_growth - wide_by_stored(readouts, tile, PRECISION)
        target = query + (place * C + tl.arange(0, C)[:, None]) * K + channels
        tl.store(target, asked, mask=channels < K)
        corrected = wide_by_stored(corrections, tile, PRECISION)
        for first in tl.range(0, K, ROWS, num_stages=STAGES):
            across = first + tl.arange(0, ROWS)
            k_tile = tl.load(k_rows + across[None, :], mask=is_row & (across < K)[None, :], other=0.0)
            block = tl.where(across[:, None] == channels, total, 0.0)
            block -= stored_by_wide(tl.trans(k_tile), corrected, PRECISION)
            square = transition + (place * K + across[:, None]) * K + channels
            tl.store(square, block, mask=(across < K)[:, None] & (channels < K))

    corrections, readouts = inverse * into * from_v, seen * from_v
    for start in tl.range(0, V, COLUMNS, num_stages=STAGES):
        channels = (start + tl.arange(0, COLUMNS))[None, :]
        tile = tl.load(v_rows + channels, mask=is_row & (channels < V), other=0.0)
        beside = offset + (place * C + tl.arange(0, C)[:, None]) * V + channels
        tl.store(beside, wide_by_stored(readouts, tile, PRECISION), mask=channels < V)
        corrected = wide_by_stored(corrections, tile, PRECISION)
        for first in tl.range(0, K, ROWS, num_stages=STAGES):
            across = first + tl.arange(0, ROWS)
            k_tile = tl.load(k_rows + across[None, :], mask=is_row & (across < K)[None, :], other=0.0)
            square = end_state + (place * K + across[:, None]) * V + channels
            mask = (across < K)[:, None] & (channels < V)
            tl.store(square, stored_by_wide(tl.trans(k_tile), corrected, PRECISION), mask=mask)


def lift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Tensor,
    rule: Rule,
    out: Maps,
    precision: Precision,
    config: LiftConfig,
) -> Launch:
    """The twin of ``reference.lift``, in fp32, into ``out``."""
    (num_chunks, size), num_heads = chunks.shape, v.shape[1]
    arguments = (
        q, k, v, g, beta, rule.A_log, rule.dt_bias, chunks, *out, len(q), num_heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride(), *beta.stride(),
        rule.scale, rule.eps, rule.beta_scale,
    )  # fmt: skip
    constants = {
        "GROUP": num_heads // k.shape[1], "K": k.shape[2], "V": v.shape[2], "C": size, "LEVELS": size.bit_length() - 1,
        "RAW": rule.A_log is not None, "NORMALISE": rule.normalise,
        "PRECISION": precision, "INNER": "ieee" if precision == "ieee" else "tf32x3",
        "ROWS": config.rows, "COLUMNS": config.columns, "STAGES": config.num_stages,
    }  # fmt: skip
    return Launch(_lift, (num_chunks * num_heads,), arguments, constants, config.num_warps)
