"""``read`` as a kernel: outputs of chunks from the states before them, scattered to tokens, the layer's norm fused.

A program per chunk, head and block of value columns; the norm needs all columns of a head in one program.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import ReadConfig
from hypic_kernels.delta.parts import both_wide, gated
from hypic_kernels.delta.rule import GatedNorm, Precision
from hypic_kernels.launch import Launch, jit_for_any


@jit_for_any("N")
def _read(
    query: tl.tensor,
    offset: tl.tensor,
    states: tl.tensor,
    chunks: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    z_token: tl.tensor,
    z_head: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PLACED: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    chunk, head = program // num_blocks // H, (program // num_blocks) % H
    columns = (program % num_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    rows = tl.arange(0, C)
    tokens = tl.load(chunks + tl.cast(chunk, tl.int64) * C + rows)
    real = (tokens >= 0) & (tokens < N)
    token = tl.where(real, tokens, 0).to(tl.int64)[:, None]
    # A chunk of padding reads nothing: its place may be anything.
    is_used = tl.max(real.to(tl.int32), axis=0) > 0
    place = tl.load(places + chunk) if PLACED else chunk
    is_stored = is_used & (place >= 0)
    row = (tl.cast(chunk, tl.int64) * H + head) * C + rows[:, None]
    inside = real[:, None] & (columns < V)
    state = states + (tl.cast(place, tl.int64) * H + head) * K * V
    total = tl.load(offset + row * V + columns, mask=inside, other=0.0)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        across = start + tl.arange(0, BLOCK_K)
        part = tl.load(query + row * K + across[None, :], mask=real[:, None] & (across < K)[None, :], other=0.0)
        mask = (across < K)[:, None] & (columns < V) & is_stored
        tile = tl.load(state + across[:, None] * V + columns, mask=mask, other=0.0).to(tl.float32)
        total = both_wide(part, tile, total, PRECISION)
    if NORM:
        mean = (tl.sum(tl.where(columns < V, total * total, 0.0), axis=1) / V)[:, None]
        total = gated(total, z, token * z_token + head * z_head + columns, weight, columns, inside, mean, eps, V)
    target = out + token * out_token + head * out_head + columns
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def read(
    query: Tensor,
    offset: Tensor,
    states: Tensor,
    chunks: Tensor,
    places: Tensor | None,
    norm: GatedNorm | None,
    out: Tensor,
    precision: Precision,
    config: ReadConfig,
) -> Launch:
    """The twin of ``reference.read`` and ``reference.normed``, into the rows of ``out`` that chunks name."""
    num_chunks, num_heads, size, key_dim = query.shape
    value_dim = offset.shape[-1]
    num_programs = num_chunks * num_heads * -(-value_dim // config.block_v)
    z, weight, eps = (out, out, 0.0) if norm is None else (norm.z, norm.weight, norm.eps)
    arguments = (
        query, offset, states, chunks, chunks if places is None else places, out, z, weight, len(out), num_heads,
        *out.stride()[:2], *z.stride()[:2], eps,
    )  # fmt: skip
    constants = {
        "K": key_dim, "V": value_dim, "C": size, "PLACED": places is not None, "NORM": norm is not None,
        "PRECISION": precision, "BLOCK_K": config.block_k, "BLOCK_V": config.block_v, "STAGES": config.num_stages,
    }  # fmt: skip
    return Launch(_read, (num_programs,), arguments, constants, config.num_warps)
