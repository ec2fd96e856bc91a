"""``lift`` as two kernels, from tokens where they lie to maps and readouts of their chunks.

The first solves: a program per chunk and value head, all of it ``[C, C]``. The second multiplies what the first leaves
with k and v: a program per block of columns of a map. Apart, each has a layout of its own and holds little; in one, the
solve's matrices and the maps' blocks spilled out of registers, and few programs were on the chip. What is computed
stands in ``reference.py``; the algebra, and why products are arranged so, in README.md. This file checks no argument:
the package's ``lift`` does.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import LiftConfig, padded
from hypic_kernels.delta.parts import exact, gates, stored_by_wide, wide_by_stored
from hypic_kernels.delta.rule import Maps, Precision, Rule
from hypic_kernels.launch import Launch, jit, jit_for_any


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
def _tokens(chunk_row: tl.tensor, N: tl.tensor, FIRST: tl.constexpr, SIZE: tl.constexpr) -> tl.tuple:
    """Tokens at ``SIZE`` places of a chunk, 0 where there is none, and where there is one."""
    tokens = tl.load(chunk_row + FIRST + tl.arange(0, SIZE))
    real = (tokens >= 0) & (tokens < N)
    return tl.where(real, tokens, 0).to(tl.int64), real


@jit
def _alone(
    q_rows: tl.tensor,
    k_rows: tl.tensor,
    real: tl.tensor,
    decay: tl.tensor,
    strength: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """``X`` and ``P`` of tokens by themselves, factors of their k and q, how states grow up to each, what remains."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    couplings, scores = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
    k_factor, q_factor = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=1):
        channels = (start + tl.arange(0, BLOCK))[None, :]
        inside = real[:, None] & (channels < K)
        k_tile = tl.load(k_rows[:, None] + channels, mask=inside, other=0.0)
        q_tile = tl.load(q_rows[:, None] + channels, mask=inside, other=0.0)
        couplings = exact(k_tile, tl.trans(k_tile), couplings, PRECISION)
        scores = exact(q_tile, tl.trans(k_tile), scores, PRECISION)
        k_factor += tl.sum(k_tile.to(tl.float32) * k_tile.to(tl.float32), axis=1)
        q_factor += tl.sum(q_tile.to(tl.float32) * q_tile.to(tl.float32), axis=1)
    k_factor = tl.rsqrt(k_factor + eps) if NORMALISE else tl.full((SIZE,), 1.0, tl.float32)
    q_factor = (tl.rsqrt(q_factor + eps) if NORMALISE else tl.full((SIZE,), 1.0, tl.float32)) * scale
    spread = tl.where(rows > columns, decay[:, None], 0.0)
    between = tl.exp(tl.cumsum(spread, axis=0)) * k_factor[None, :]
    lower = tl.where(rows > columns, couplings * between * (strength * k_factor)[:, None], 0.0)
    scores = tl.where(rows >= columns, scores * between * q_factor[:, None], 0.0)
    growth, remaining = tl.exp(tl.cumsum(decay, axis=0)), tl.exp(tl.sum(spread, axis=0))
    return _inverse(lower, SIZE, LEVELS, INNER), scores, k_factor, q_factor, growth, remaining


@jit
def _cells(own: tl.tensor, ROW: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Places of a block of the first matrix; those of the second come ``C C`` later."""
    return own + (ROW + tl.arange(0, SIZE)[:, None]) * C + COLUMN + tl.arange(0, SIZE)[None, :]


@jit
def _keep_factors(
    own: tl.tensor,
    k_factor: tl.tensor,
    q_factor: tl.tensor,
    growth: tl.tensor,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    C: tl.constexpr,
) -> None:
    places = own + 2 * C * C + FIRST + tl.arange(0, SIZE)
    tl.store(places, growth * k_factor)
    tl.store(places + C, growth * q_factor)
    tl.store(places + 2 * C, growth)


@jit_for_any("N")
def _solve(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    chunks: tl.tensor,
    solved: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    beta_scale: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    RAW: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One chunk, one value head: ``diag(r) X diag(beta)``, ``P X diag(beta)`` and three numbers per token.

    Chunks of more than 16 are solved in halves of ``SIZE``, the lower rows (``l_``) after the upper, so that matrices
    are a quarter as large. From the upper to the lower half decays are products of what remains and what grows.
    Neighbouring programs share tokens and, where heads are grouped, q and k.
    """
    chunk, head = tl.program_id(0) // H, tl.program_id(0) % H
    chunk_row = chunks + tl.cast(chunk, tl.int64) * C
    own = solved + tl.cast(tl.program_id(0), tl.int64) * (2 * C * C + 3 * C)
    q_from, k_from = q + (head // GROUP) * q_head, k + (head // GROUP) * k_head
    g_from, beta_from = head * g_head, head * beta_head

    token, real = _tokens(chunk_row, N, 0, SIZE)
    k_rows = k_from + token * k_token
    decay, strength = gates(
        g, beta, A_log, dt_bias, token * g_token + g_from, token * beta_token + beta_from, head, real, beta_scale, RAW
    )
    inverse, scores, k_factor, q_factor, growth, remaining = _alone(
        q_from + token * q_token, k_rows, real, decay, strength, scale, eps, K, SIZE, LEVELS, NORMALISE, PRECISION,
        INNER, BLOCK,
    )  # fmt: skip
    here = _cells(own, 0, 0, SIZE, C)
    tl.store(here, inverse * (remaining * k_factor)[:, None] * strength[None, :])
    tl.store(here + C * C, tl.dot(scores, inverse, input_precision=INNER) * strength[None, :])
    _keep_factors(own, k_factor, q_factor, growth, 0, SIZE, C)
    if SIZE < C:
        # The kernel's own stores are its memory: held in registers, both halves would spill.
        l_token, l_real = _tokens(chunk_row, N, SIZE, SIZE)
        l_q_rows, l_k_rows = q_from + l_token * q_token, k_from + l_token * k_token
        l_decay, l_strength = gates(
            g, beta, A_log, dt_bias, l_token * g_token + g_from, l_token * beta_token + beta_from, head, l_real,
            beta_scale, RAW,
        )  # fmt: skip
        inverse, scores, k_factor, q_factor, growth, l_remaining = _alone(
            l_q_rows, l_k_rows, l_real, l_decay, l_strength, scale, eps, K, SIZE, LEVELS, NORMALISE, PRECISION, INNER,
            BLOCK,
        )  # fmt: skip
        within, parked = _cells(own, SIZE, SIZE, SIZE, C), _cells(own, 0, SIZE, SIZE, C)
        tl.store(within, inverse * (l_remaining * k_factor)[:, None] * l_strength[None, :])
        tl.store(within + C * C, tl.dot(scores, inverse, input_precision=INNER) * l_strength[None, :])
        _keep_factors(own, k_factor, q_factor, growth * tl.exp(tl.sum(decay, axis=0)), SIZE, SIZE, C)
        tl.store(parked, inverse)
        tl.store(parked + C * C, scores)
        tl.debug_barrier()

        corner, crossing = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
        for start in tl.range(0, K, BLOCK, num_stages=1):
            channels = (start + tl.arange(0, BLOCK))[None, :]
            inside = l_real[:, None] & (channels < K)
            k_tile = tl.load(k_rows[:, None] + channels, mask=real[:, None] & (channels < K), other=0.0)
            l_k_tile = tl.load(l_k_rows[:, None] + channels, mask=inside, other=0.0)
            l_q_tile = tl.load(l_q_rows[:, None] + channels, mask=inside, other=0.0)
            corner = exact(l_k_tile, tl.trans(k_tile), corner, PRECISION)
            crossing = exact(l_q_tile, tl.trans(k_tile), crossing, PRECISION)
        above = tl.load(here)
        corner = tl.dot(corner * (growth * l_strength * k_factor)[:, None], above, input_precision=INNER)
        crossing = tl.dot(crossing * (growth * q_factor)[:, None], above, input_precision=INNER)
        corner = -tl.dot(tl.load(parked), corner, input_precision=INNER)
        crossing = tl.dot(tl.load(parked + C * C), corner, acc=crossing, input_precision=INNER)
        tl.debug_barrier()
        below, nothing = _cells(own, SIZE, 0, SIZE, C), tl.zeros((SIZE, SIZE), tl.float32)
        tl.store(here, above * tl.exp(tl.sum(l_decay, axis=0)))
        tl.store(below, corner * (l_remaining * k_factor)[:, None])
        tl.store(below + C * C, crossing)
        tl.store(parked, nothing)
        tl.store(parked + C * C, nothing)


@jit
def _columns(
    source: tl.tensor,
    q_rows: tl.tensor,
    k_rows: tl.tensor,
    real: tl.tensor,
    own: tl.tensor,
    target: tl.tensor,
    readout: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    IS_KEY: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Columns from ``first`` on: of ``T`` and ``Q``, whose ``source`` is k (``IS_KEY``), or of ``B`` and ``O``, v."""
    places = tl.arange(0, C)
    rows, is_row = places[:, None], real[:, None]
    channels = (first + tl.arange(0, COLUMNS))[None, :]
    inside = is_row & (channels < WIDTH)
    cells = own + rows * C + places[None, :]
    tile = tl.load(source + channels, mask=inside, other=0.0)
    if IS_KEY:
        taken = -tl.load(own + 2 * C * C + places)[None, :]
        asked = wide_by_stored(tl.load(cells + C * C) * taken, tile, PRECISION)
        q_tile = tl.load(q_rows + channels, mask=inside, other=0.0).to(tl.float32)
        asked += q_tile * tl.load(own + 2 * C * C + C + places)[:, None]
        corrections = tl.load(cells) * taken
    else:
        asked = wide_by_stored(tl.load(cells + C * C), tile, PRECISION)
        corrections = tl.load(cells)
    tl.store(readout + rows * WIDTH + channels, asked, mask=channels < WIDTH)
    corrected = wide_by_stored(corrections, tile, PRECISION)
    for start in tl.range(0, K, ROWS, num_stages=1):
        across = start + tl.arange(0, ROWS)
        k_tile = tl.load(k_rows + across[None, :], mask=is_row & (across < K)[None, :], other=0.0)
        block = stored_by_wide(tl.trans(k_tile), corrected, PRECISION)
        if IS_KEY:
            total = tl.load(own + 2 * C * C + 3 * C - 1)
            block += tl.where(across[:, None] == channels, total, 0.0)
        mask = (across < K)[:, None] & (channels < WIDTH)
        tl.store(target + across[:, None] * WIDTH + channels, block, mask=mask)


@jit_for_any("N")
def _multiply(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    chunks: tl.tensor,
    solved: tl.tensor,
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
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One chunk, one value head, ``COLUMNS`` of its map and readout."""
    of_keys: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    blocks: tl.constexpr = of_keys + (V + COLUMNS - 1) // COLUMNS
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    chunk, head = program // H, program % H
    place = tl.cast(program, tl.int64)
    tokens = tl.load(chunks + tl.cast(chunk, tl.int64) * C + tl.arange(0, C))
    real = (tokens >= 0) & (tokens < N)
    token = tl.where(real, tokens, 0).to(tl.int64)
    q_rows = (q + (head // GROUP) * q_head + token * q_token)[:, None]
    k_rows = (k + (head // GROUP) * k_head + token * k_token)[:, None]
    own = solved + place * (2 * C * C + 3 * C)
    if block < of_keys:
        _columns(
            k_rows, q_rows, k_rows, real, own, transition + place * K * K, query + place * C * K, block * COLUMNS,
            K, True, K, C, PRECISION, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        v_rows = (v + head * v_head + token * v_token)[:, None]
        _columns(
            v_rows, q_rows, k_rows, real, own, end_state + place * K * V, offset + place * C * V,
            (block - of_keys) * COLUMNS, V, False, K, C, PRECISION, ROWS, COLUMNS,
        )  # fmt: skip


class Lifting(NamedTuple):
    """The two launches, in their order."""

    solve: Launch
    multiply: Launch

    def run(self) -> None:
        for launch in self:
            launch.run()


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
) -> Lifting:
    """The twin of ``reference.lift``, in fp32, into ``out``; between, ``4 C (2 C + 3)`` bytes per chunk and head."""
    (num_chunks, size), num_heads, key_dim, value_dim = chunks.shape, v.shape[1], k.shape[2], v.shape[2]
    num_programs = num_chunks * num_heads
    num_blocks = -(-key_dim // config.columns) - (-value_dim // config.columns)
    solved = solved_like(v, chunks)
    shared = {"GROUP": num_heads // k.shape[1], "K": key_dim, "C": size, "PRECISION": precision}
    multiply = Launch(
        _multiply,
        (num_programs * num_blocks,),
        (
            q, k, v, chunks, solved, *out, q.shape[0], num_heads, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        ),
        {**shared, "V": value_dim, "ROWS": config.rows, "COLUMNS": config.columns},
        config.num_warps,
    )  # fmt: skip
    return Lifting(solve(q, k, g, beta, chunks, rule, solved, precision, config), multiply)


def solved_like(v: Tensor, chunks: Tensor) -> Tensor:
    """Memory for what ``solve`` leaves: two ``[C, C]`` matrices and three numbers per token, by chunk and head."""
    size = chunks.shape[1]
    return torch.empty(chunks.shape[0] * v.shape[1], 2 * size * size + 3 * size, device=v.device)


def solve(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Tensor,
    rule: Rule,
    solved: Tensor,
    precision: Precision,
    config: LiftConfig,
) -> Launch:
    """``diag(r) X diag(beta)``, ``P X diag(beta)`` and growths of every chunk and head, into ``solved``."""
    (_, size), num_heads, key_dim = chunks.shape, g.shape[1], k.shape[2]
    half = max(16, size // 2)
    return Launch(
        _solve,
        (solved.shape[0],),
        (
            q, k, g, beta, rule.A_log, rule.dt_bias, chunks, solved, q.shape[0], num_heads, *q.stride()[:2],
            *k.stride()[:2], *g.stride(), *beta.stride(), rule.scale, rule.eps, rule.beta_scale,
        ),
        {
            "GROUP": num_heads // k.shape[1], "K": key_dim, "C": size, "SIZE": half, "LEVELS": half.bit_length() - 1,
            "RAW": rule.A_log is not None, "NORMALISE": rule.normalise,
            "INNER": "ieee" if precision == "ieee" else "tf32x3",
            "BLOCK": min(padded(key_dim), 128 // k.element_size()),
            # Its products of stored numbers are the same for both of these, so that one kernel is built.
            "PRECISION": "bf16" if precision == "bf16x3" else precision,
        },
        config.solve_warps,
    )  # fmt: skip
