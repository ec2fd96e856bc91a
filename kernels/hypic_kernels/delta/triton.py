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
def _merged(
    inverse: tl.tensor,
    lower: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """From the inverses of diagonal blocks of ``2 ** FIRST`` rows to those of ``2 ** LAST``.

    ``[[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]``; all corners ``L`` of one size take two products.
    """
    for level in tl.static_range(FIRST, LAST):
        is_corner = ((rows >> (level + 1)) == (columns >> (level + 1))) & ((rows >> level) != (columns >> level))
        corner = tl.dot(tl.where(is_corner, lower, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, corner, input_precision=PRECISION)
    return inverse


@jit
def _blocks_inverse(lower: tl.tensor, C: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Inverses of the diagonal blocks of 16 rows, all at once; zero elsewhere."""
    blocks: tl.constexpr = C // 16
    rows, columns = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    across, along = tl.arange(0, blocks)[:, None, None, None], tl.arange(0, blocks)[None, None, :, None]
    tiles = tl.reshape(lower, (blocks, 16, blocks, 16))
    own = tl.sum(tl.where(across == along, tiles, 0.0), axis=2)
    inverse = tl.where(rows == columns, 1.0, 0.0) - tl.where((rows >> 1) == (columns >> 1), own, 0.0)
    inverse = _merged(inverse, own, rows, columns, 1, 4, PRECISION)
    return tl.reshape(tl.where(across == along, inverse[:, :, None, :], 0.0), (C, C))


@jit
def _inverse(lower: tl.tensor, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """``(I + lower)^-1`` of a strictly lower triangular ``[C, C]``: blocks of 16 side by side, then together."""
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if C == 16:
        inverse = tl.where(rows == columns, 1.0, 0.0) - tl.where((rows >> 1) == (columns >> 1), lower, 0.0)
        inverse = _merged(inverse, lower, rows, columns, 1, LEVELS, PRECISION)
    else:
        inverse = _blocks_inverse(lower, C, PRECISION)
        inverse = _merged(inverse, lower, rows, columns, 4, LEVELS, PRECISION)
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

    # Before every product that asks for it, what it needs is loaded again: held, it would not fit into registers.
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    couplings = tl.zeros((C, C), tl.float32)
    k_factor = tl.zeros((C,), tl.float32)
    for start in tl.range(0, K, ROWS, num_stages=STAGES):
        channels = (start + tl.arange(0, ROWS))[None, :]
        k_tile = tl.load(k_rows + channels, mask=is_row & (channels < K), other=0.0)
        couplings = exact(k_tile, tl.trans(k_tile), couplings, PRECISION)
        k_factor += tl.sum(k_tile.to(tl.float32) * k_tile.to(tl.float32), axis=1)
    k_factor = tl.rsqrt(k_factor + eps) if NORMALISE else tl.full((C,), 1.0, tl.float32)
    spread = tl.where(rows > columns, decay[:, None], 0.0)
    remaining = tl.exp(tl.sum(spread, axis=0))
    growth = tl.exp(tl.cumsum(decay, axis=0))
    total = tl.exp(tl.sum(decay, axis=0))
    lower = couplings * tl.exp(tl.cumsum(spread, axis=0)) * (strength * k_factor)[:, None] * k_factor[None, :]
    inverse = _inverse(tl.where(rows > columns, lower, 0.0), C, LEVELS, INNER)

    scores = tl.zeros((C, C), tl.float32)
    q_factor = tl.zeros((C,), tl.float32)
    for start in tl.range(0, K, ROWS, num_stages=STAGES):
        channels = (start + tl.arange(0, ROWS))[None, :]
        inside = is_row & (channels < K)
        q_tile = tl.load(q_rows + channels, mask=inside, other=0.0)
        k_tile = tl.load(k_rows + channels, mask=inside, other=0.0)
        scores = exact(q_tile, tl.trans(k_tile), scores, PRECISION)
        q_factor += tl.sum(q_tile.to(tl.float32) * q_tile.to(tl.float32), axis=1)
    q_factor = (tl.rsqrt(q_factor + eps) if NORMALISE else tl.full((C,), 1.0, tl.float32)) * scale
    spread = tl.where(rows > columns, decay[:, None], 0.0)
    scores = scores * tl.exp(tl.cumsum(spread, axis=0)) * q_factor[:, None] * k_factor[None, :]
    seen = tl.dot(tl.where(rows >= columns, scores, 0.0), inverse, input_precision=INNER)
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
        tl.store(query + (place * C + rows) * K + channels, asked, mask=channels < K)
        corrected = wide_by_stored(corrections, tile, PRECISION)
        for first in tl.range(0, K, ROWS, num_stages=STAGES):
            across = first + tl.arange(0, ROWS)
            k_tile = tl.load(k_rows + across[None, :], mask=is_row & (across < K)[None, :], other=0.0)
            block = tl.where(across[:, None] == channels, total, 0.0)
            block -= stored_by_wide(tl.trans(k_tile), corrected, PRECISION)
            target = transition + (place * K + across[:, None]) * K + channels
            tl.store(target, block, mask=(across < K)[:, None] & (channels < K))

    corrections, readouts = inverse * into * from_v, seen * from_v
    for start in tl.range(0, V, COLUMNS, num_stages=STAGES):
        channels = (start + tl.arange(0, COLUMNS))[None, :]
        tile = tl.load(v_rows + channels, mask=is_row & (channels < V), other=0.0)
        tl.store(
            offset + (place * C + rows) * V + channels, wide_by_stored(readouts, tile, PRECISION), mask=channels < V
        )
        corrected = wide_by_stored(corrections, tile, PRECISION)
        for first in tl.range(0, K, ROWS, num_stages=STAGES):
            across = first + tl.arange(0, ROWS)
            k_tile = tl.load(k_rows + across[None, :], mask=is_row & (across < K)[None, :], other=0.0)
            target = end_state + (place * K + across[:, None]) * V + channels
            mask = (across < K)[:, None] & (channels < V)
            tl.store(target, stored_by_wide(tl.trans(k_tile), corrected, PRECISION), mask=mask)


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
