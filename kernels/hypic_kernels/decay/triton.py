"""``lift`` and ``read`` as kernels, from tokens where they lie: a program per chunk, head and block of value columns.

q and k are prepared (silu, norm, rotation) where they are needed, so nothing but maps and outputs is written. A chunk
of padding does nothing. What is computed stands in ``reference.py``; this file checks no argument: the package does.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.decay.layout import LiftConfig, ReadConfig
from hypic_kernels.decay.parts import norm_factor, places_of, prepared, spread_of
from hypic_kernels.decay.rule import Maps, Precision, Rule
from hypic_kernels.delta.parts import both_wide
from hypic_kernels.launch import Launch, jit, jit_for_any


@jit
def _values(
    v: tl.tensor,
    place: tl.tensor,
    columns: tl.tensor,
    real: tl.tensor,
    V: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:
    value = tl.load(v + place + columns, mask=real & (columns < V), other=0.0).to(tl.float32)
    if SILU:
        value *= tl.sigmoid(value)
    return value


@jit_for_any("N")
def _lift(
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    chunks: tl.tensor,
    transition: tl.tensor,
    end_state: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    angle_token: tl.tensor,
    eps: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    chunk, head = program // H, program % H
    tokens, is_token = places_of(chunks + tl.cast(chunk, tl.int64) * C, N, C)
    if tl.max(is_token.to(tl.int32), axis=0) > 0:
        decay = tl.load(g + tokens * g_token + head * g_head, mask=is_token, other=0.0).to(tl.float32)
        remaining = tl.exp(tl.sum(spread_of(decay, C), axis=0))
        tl.store(transition + program, tl.exp(tl.sum(decay, axis=0)), mask=block == 0)
        token, real = tokens[:, None], is_token[:, None]
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        value = _values(v, token * v_token + head * v_head, columns, real, V, SILU) * remaining[:, None]
        rows = k + token * k_token + (head // GROUP) * k_head
        cos_rows, sin_rows = cos + token * angle_token, sin + token * angle_token
        factor = norm_factor(rows, real, eps, K, C, SILU, NORM, BLOCK_K)
        target = end_state + tl.cast(program, tl.int64) * K * V
        for start in tl.range(0, K, BLOCK_K, num_stages=1):
            across = start + tl.arange(0, BLOCK_K)
            key = prepared(rows, real, across[None, :], factor, weight, cos_rows, sin_rows, K, HALF, SILU, NORM)
            tile = both_wide(tl.trans(key), value, tl.zeros((BLOCK_K, BLOCK_V), tl.float32), PRECISION)
            tl.store(target + across[:, None] * V + columns, tile, mask=(across < K)[:, None] & (columns < V))


@jit_for_any("N")
def _read(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    chunks: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
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
    angle_token: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Scores of the chunk's own tokens are made anew in each block of columns: they cost less than to be kept."""
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    chunk, head = program // H, program % H
    tokens, is_token = places_of(chunks + tl.cast(chunk, tl.int64) * C, N, C)
    if tl.max(is_token.to(tl.int32), axis=0) > 0:
        decay = tl.load(g + tokens * g_token + head * g_head, mask=is_token, other=0.0).to(tl.float32)
        growth = tl.exp(tl.cumsum(decay, axis=0))[:, None]
        token, real = tokens[:, None], is_token[:, None]
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        q_rows = q + token * q_token + (head // GROUP) * q_head
        k_rows = k + token * k_token + (head // GROUP) * k_head
        cos_rows, sin_rows = cos + token * angle_token, sin + token * angle_token
        q_factor = norm_factor(q_rows, real, eps, K, C, SILU, NORM, BLOCK_K)
        k_factor = norm_factor(k_rows, real, eps, K, C, SILU, NORM, BLOCK_K)
        state = states + tl.cast(program, tl.int64) * K * V
        total, scores = tl.zeros((C, BLOCK_V), tl.float32), tl.zeros((C, C), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=1):
            across = start + tl.arange(0, BLOCK_K)
            channels = across[None, :]
            tile = tl.load(
                state + across[:, None] * V + columns, mask=(across < K)[:, None] & (columns < V), other=0.0
            ).to(tl.float32)
            asked = prepared(q_rows, real, channels, q_factor, q_weight, cos_rows, sin_rows, K, HALF, SILU, NORM)
            key = prepared(k_rows, real, channels, k_factor, k_weight, cos_rows, sin_rows, K, HALF, SILU, NORM)
            scores = both_wide(asked, tl.trans(key), scores, PRECISION)
            total = both_wide(asked * growth, tile, total, PRECISION)
        is_seen = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
        scores = tl.where(is_seen, scores * tl.exp(tl.cumsum(spread_of(decay, C), axis=0)), 0.0)
        value = _values(v, token * v_token + head * v_head, columns, real, V, SILU)
        total = both_wide(scores, value, total, PRECISION) * scale
        target = out + token * out_token + head * out_head + columns
        tl.store(target, total.to(out.dtype.element_ty), mask=real & (columns < V))


def lift(
    k: Tensor, v: Tensor, g: Tensor, chunks: Tensor, rule: Rule, out: Maps, precision: Precision, config: LiftConfig
) -> Launch:
    """The twin of ``reference.lift``, in fp32, into ``out``."""
    (num_chunks, size), num_heads, value_dim = chunks.shape, v.shape[1], v.shape[2]
    cos, sin, angle_token = _angles(rule, g)
    arguments = (
        k, v, g, k if rule.k_weight is None else rule.k_weight, cos, sin, chunks, *out, k.shape[0], num_heads,
        *k.stride()[:2], *v.stride()[:2], *g.stride(), angle_token, rule.eps,
    )  # fmt: skip
    constants = _constants(k, v, size, rule, precision, config)
    grid = (num_chunks * num_heads * -(-value_dim // config.block_v),)
    return Launch(_lift, grid, arguments, constants, config.num_warps)


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    states: Tensor,
    chunks: Tensor,
    rule: Rule,
    out: Tensor,
    precision: Precision,
    config: ReadConfig,
) -> Launch:
    """The twin of ``reference.read``, into the rows of ``out`` that chunks name."""
    (num_chunks, size), num_heads, value_dim = chunks.shape, v.shape[1], v.shape[2]
    cos, sin, angle_token = _angles(rule, g)
    weights = [k if weight is None else weight for weight in (rule.q_weight, rule.k_weight)]
    arguments = (
        q, k, v, g, *weights, cos, sin, chunks, states, out, k.shape[0], num_heads, *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], *g.stride(), angle_token, *out.stride()[:2], rule.eps, rule.scale,
    )  # fmt: skip
    constants = _constants(k, v, size, rule, precision, config)
    grid = (num_chunks * num_heads * -(-value_dim // config.block_v),)
    return Launch(_read, grid, arguments, constants, config.num_warps)


def _angles(rule: Rule, unused: Tensor) -> tuple[Tensor, Tensor, int]:
    """Cosines, sines, and numbers from one token's to the next one's."""
    if rule.cos is None or rule.sin is None:
        return unused, unused, 0
    return rule.cos, rule.sin, rule.cos.stride(0)


def _constants(
    k: Tensor, v: Tensor, size: int, rule: Rule, precision: Precision, config: LiftConfig | ReadConfig
) -> dict[str, object]:
    return {
        "GROUP": v.shape[1] // k.shape[1], "K": k.shape[2], "V": v.shape[2], "C": size, "HALF": rule.num_turned,
        "SILU": rule.silu, "NORM": rule.k_weight is not None, "PRECISION": precision, "BLOCK_K": config.block_k,
        "BLOCK_V": config.block_v,
    }  # fmt: skip
