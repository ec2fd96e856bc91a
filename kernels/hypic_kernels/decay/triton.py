"""``run`` as kernels: one walks the chunks of a row with a block of the state in registers and leaves the state before
each; the other reads all chunks at once.

Decays between two tokens are made from sums of what stands between them, never as a difference of running sums, which
one very strong decay would blur. Loops are not pipelined: Triton 3.6 has overwritten tiles that a product still read.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import torch
import triton.language as tl
from torch import Tensor

from hypic_kernels.decay.check import Precision
from hypic_kernels.delta.parts import both_wide
from hypic_kernels.launch import Launch, jit, jit_for_any
from hypic_kernels.rows import CHUNK, Rows

BLOCK_K, BLOCK_V = 64, 32
READ_K, READ_V = 32, 64


@jit
def _tile(
    x: tl.tensor, token: tl.tensor, x_token: tl.tensor, place: tl.tensor, columns: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """``[C, columns]`` of one head, in fp32."""
    return tl.load(x + token[:, None] * x_token + place + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def _walk(
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    tokens: tl.tensor,
    cu_seqlens: tl.tensor,
    chunk_offsets: tl.tensor,
    initial: tl.tensor,
    before: tl.tensor,
    final: tl.tensor,
    decays: tl.tensor,
    H: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    num_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    num_v: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    part, head, row = program % (num_k * num_v), program // (num_k * num_v) % H, program // (num_k * num_v * H)
    down, across = part // num_v * BLOCK_K + tl.arange(0, BLOCK_K), part % num_v * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (down < K)[:, None] & (across < V)[None, :]
    block = down[:, None] * V + across[None, :]
    start, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    chunk = tl.load(chunk_offsets + row)
    own = (tl.cast(row, tl.int64) * H + head) * K * V
    state = tl.load(initial + own + block, mask=inside, other=0.0).to(tl.float32)
    total = 0.0
    for first in tl.range(start, end, C, num_stages=1):
        place = (tl.cast(chunk, tl.int64) * H + head) * K * V
        tl.store(before + place + block, state, mask=inside)
        places = first + tl.arange(0, C)
        real = places < end
        token = tl.load(tokens + places, mask=real, other=0).to(tl.int64)
        later = tl.load(tokens + places + 1, mask=places + 1 < end, other=0).to(tl.int64)
        gate = tl.load(g + token * g_token + head * g_head, mask=real, other=0.0).to(tl.float32)
        is_followed = (places + 1 < end) & (tl.arange(0, C) + 1 < C)
        after = tl.load(g + later * g_token + head * g_head, mask=is_followed, other=0.0).to(tl.float32)
        remaining = tl.exp(tl.cumsum(after, axis=0, reverse=True))
        sum = tl.sum(gate, axis=0)
        key = _tile(k, token, k_token, head // GROUP * k_head, down, real[:, None] & (down < K)[None, :])
        value = _tile(v, token, v_token, head * v_head, across, real[:, None] & (across < V)[None, :])
        state = both_wide(tl.trans(key), value * remaining[:, None], state * tl.exp(sum), PRECISION)
        total += sum
        chunk += 1
    tl.store(final + own + block, state, mask=inside)
    tl.store(decays + row * H + head, tl.exp(total), mask=part == 0)


@jit_for_any("M")
def _read(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    tokens: tl.tensor,
    cu_seqlens: tl.tensor,
    chunk_indices: tl.tensor,
    before: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    num_v: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    across = program % num_v * BLOCK_V + tl.arange(0, BLOCK_V)
    head, chunk = program // num_v % H, program // (num_v * H)
    row, number = tl.load(chunk_indices + 2 * chunk), tl.load(chunk_indices + 2 * chunk + 1)
    within = tl.arange(0, C)
    places = tl.load(cu_seqlens + row) + number * C + within
    real = places < tl.load(cu_seqlens + row + 1)
    token = tl.load(tokens + places, mask=real, other=0).to(tl.int64)
    gate = tl.load(g + token * g_token + head * g_head, mask=real, other=0.0).to(tl.float32)
    state = before + (tl.cast(chunk, tl.int64) * H + head) * K * V
    scores = tl.zeros((C, C), tl.float32)
    total = tl.zeros((C, BLOCK_V), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        down = start + tl.arange(0, BLOCK_K)
        mask = real[:, None] & (down < K)[None, :]
        query = _tile(q, token, q_token, head // GROUP * q_head, down, mask)
        key = _tile(k, token, k_token, head // GROUP * k_head, down, mask)
        inside = (down < K)[:, None] & (across < V)[None, :]
        held = tl.load(state + down[:, None] * V + across[None, :], mask=inside, other=0.0)
        total = both_wide(query, held, total, PRECISION)
        scores = both_wide(query, tl.trans(key), scores, PRECISION)
    is_later = within[:, None] > within[None, :]
    decay = tl.exp(tl.cumsum(tl.where(is_later, gate[:, None], 0.0), axis=0))
    decay = tl.where(within[:, None] >= within[None, :], decay, 0.0)
    mask = real[:, None] & (across < V)[None, :]
    value = _tile(v, token, v_token, head * v_head, across, mask)
    total = both_wide(scores * decay, value, total * tl.exp(tl.cumsum(gate, axis=0))[:, None], PRECISION)
    target = out + token[:, None] * out_token + head * out_head + across[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: Rows, initial: Tensor, out: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """The twin of ``reference.run``, with outputs where their tokens stand."""
    walk, read, final, decays = launches(q, k, v, g, rows, initial, out, precision)
    walk.run()
    read.run()
    return final, decays


def launches(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: Rows, initial: Tensor, out: Tensor, precision: Precision
) -> tuple[Launch, Launch, Tensor, Tensor]:
    """Both launches, the final states and the decays."""
    (num_heads, value_dim), key_dim = v.shape[1:], k.shape[2]
    num_chunks, num_rows = len(rows.chunk_indices), rows.num_rows
    before = v.new_empty((num_chunks, num_heads, key_dim, value_dim), dtype=torch.float32)
    final = v.new_empty((num_rows, num_heads, key_dim, value_dim), dtype=torch.float32)
    decays = v.new_empty((num_rows, num_heads), dtype=torch.float32)
    sizes = {"GROUP": num_heads // k.shape[1], "K": key_dim, "V": value_dim, "C": CHUNK, "PRECISION": precision}
    strides = (*k.stride()[:2], *v.stride()[:2], *g.stride())
    walked = (k, v, g, rows.tokens, rows.cu_seqlens, rows.chunk_offsets, initial, before, final, decays, num_heads)
    num_blocks = -(-key_dim // BLOCK_K) * -(-value_dim // BLOCK_V)
    walk = Launch(
        _walk, (num_rows * num_heads * num_blocks,), (*walked, *strides),
        {**sizes, "BLOCK_K": BLOCK_K, "BLOCK_V": BLOCK_V}, 4,
    )  # fmt: skip
    given = (q, k, v, g, rows.tokens, rows.cu_seqlens, rows.chunk_indices, before, out, num_chunks, num_heads)
    read = Launch(
        _read, (num_chunks * num_heads * -(-value_dim // READ_V),),
        (*given, *q.stride()[:2], *strides, *out.stride()[:2]), {**sizes, "BLOCK_K": READ_K, "BLOCK_V": READ_V}, 4,
    )  # fmt: skip
    return walk, read, final, decays
