"""The kernel of ``triton.py`` for heads of 64, 128 or 256 on compute capability 9.0, with its pipeline laid by hand.

A block of keys is multiplied with the queries while the block before it is weighed and its values are added up
(FlashAttention-3, arXiv 2407.08608): products of one block run under the exponentials of the next, and both under the
copies of the ones after. Keys have been turned before, by ``turn.py``. Written in Gluon, which has no interpreter.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

PIECE = gl.constexpr(64)
"""Channels that lie side by side in shared memory: 128 bytes."""


def jit(function: Callable[..., Any]) -> Any:
    """``gluon.jit``, typed whether or not a type checker can see Triton. One kernel serves any number of chains."""
    return gluon.jit(function, do_not_specialize=["num_chains"])


@jit
def _store_queries(
    q: gl.tensor,
    rows: gl.tensor,
    valid: gl.tensor,
    positions: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    target: gl.tensor,
    HALF: gl.constexpr,
    WIDTH: gl.constexpr,
    COPY: gl.constexpr,
) -> None:
    """Turned queries of the tile to shared memory, one piece of channels after the other."""
    within = gl.arange(0, PIECE, gl.SliceLayout(0, COPY))
    mask = valid[:, None] & (within >= 0)[None, :]
    for piece in gl.static_range(WIDTH // PIECE):
        channels = piece * PIECE + within
        x = gl.load(q + rows[:, None] + channels[None, :], mask=mask, other=0.0).to(gl.float32)
        if piece * PIECE < 2 * HALF:
            is_first = channels < HALF
            partner = gl.where(is_first, channels + HALF, channels - HALF)
            y = gl.load(q + rows[:, None] + partner[None, :], mask=mask, other=0.0).to(gl.float32)
            angles = positions[:, None] * HALF + gl.where(is_first, channels, channels - HALF)[None, :]
            c = gl.load(cos + angles, mask=mask, other=0.0)
            s = gl.load(sin + angles, mask=mask, other=0.0)
            x = x * c + y * gl.where(is_first[None, :], -s, s)
        target.slice(piece * PIECE, PIECE, dim=1).store(x.to(target.dtype))


@jit
def _copy_keys(
    keys: gl.tensor,
    key_rows: gl.tensor,
    ready: gl.tensor,
    ready_rows: gl.tensor,
    target: gl.tensor,
    TURNED: gl.constexpr,
    WIDTH: gl.constexpr,
    COPY: gl.constexpr,
) -> None:
    """Keys on their way to shared memory: what turns from where it lies turned, the rest from the pool.

    One copy, though from two places: after several, the compiler would have warps wait for each other.
    """
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))[None, :]
    places = keys + key_rows[:, None] + channels
    if TURNED > 0:
        places = gl.where(channels < TURNED, ready + ready_rows[:, None] + channels, places)
    async_copy.async_copy_global_to_shared(target, places)


@jit
def _copy_values(
    values: gl.tensor,
    rows: gl.tensor,
    target: gl.tensor,
    VALUE: gl.constexpr,
    COPY: gl.constexpr,
) -> None:
    channels = gl.arange(0, VALUE, gl.SliceLayout(0, COPY))[None, :]
    async_copy.async_copy_global_to_shared(target, values + rows[:, None] + channels)


@jit
def _weigh(
    scores: gl.tensor,
    top: gl.tensor,
    total: gl.tensor,
    last: gl.tensor,
    here: gl.tensor,
    clear: gl.tensor,
    scale: gl.tensor,
    BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr,
) -> gl.tuple:
    """Weights of a block; the largest score so far and the sum of weights, and what earlier sums shrink by."""
    if here + BLOCK_N > clear:
        indices = here + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        scores = gl.where(indices[None, :] <= last[:, None], scores, -float("inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    # A row that has seen nothing yet: -inf less -inf is not a number.
    shift = gl.where(higher == -float("inf"), 0.0, higher)
    weights = gl.exp2(scores * scale - shift[:, None])
    shrink = gl.exp2(top - shift)
    return weights, higher, total * shrink + gl.sum(weights, 1), shrink


@jit
def _attend(
    q: gl.tensor,
    keys: gl.tensor,
    values: gl.tensor,
    cos: gl.tensor,
    sin: gl.tensor,
    ready: gl.tensor,
    slots: gl.tensor,
    starts: gl.tensor,
    lengths: gl.tensor,
    token_positions: gl.tensor,
    tile_chain: gl.tensor,
    tile_first: gl.tensor,
    tile_count: gl.tensor,
    tile_parts: gl.tensor,
    part_tile: gl.tensor,
    part_begin: gl.tensor,
    part_end: gl.tensor,
    out: gl.tensor,
    parts: gl.tensor,
    logs: gl.tensor,
    q_stride: gl.tensor,
    q_head_stride: gl.tensor,
    key_stride: gl.tensor,
    key_head_stride: gl.tensor,
    value_stride: gl.tensor,
    value_head_stride: gl.tensor,
    ready_stride: gl.tensor,
    out_stride: gl.tensor,
    out_head_stride: gl.tensor,
    num_chains: gl.tensor,
    scale: gl.tensor,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    WIDTH: gl.constexpr,
    VALUE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_C: gl.constexpr,
    TILE: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """One part of a tile, ``HEADS`` heads that share a key."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VALUE, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    TURNED: gl.constexpr = 2 * HALF

    num_blocks: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = gl.program_id(0)
    part = program // (KEY_HEADS * num_blocks)
    tile = gl.load(part_tile + part)
    if tile < 0:
        return
    block = program % (KEY_HEADS * num_blocks)
    key_head = block // num_blocks
    chain = gl.load(tile_chain + tile)
    count = gl.load(tile_count + tile)
    first = gl.load(tile_first + tile)
    begin, stop = gl.load(part_begin + part), gl.load(part_end + part)
    start = gl.load(starts + chain)
    counted = gl.full([BLOCK_C], 0, gl.int32, gl.SliceLayout(1, COPY))
    for others in range(0, chain, BLOCK_C):
        earlier = others + gl.arange(0, BLOCK_C, gl.SliceLayout(1, COPY))
        counted += gl.load(lengths + earlier, mask=(earlier < chain) & (earlier < num_chains), other=0)
    before = gl.sum(counted, 0)

    places = gl.arange(0, BLOCK_M, ROWS)
    within = block % num_blocks * HEADS + places % HEADS
    valid = (places < count * HEADS) & (within < GROUP)
    token = gl.where(valid, first + places // HEADS, 0).to(gl.int64)
    head = key_head * GROUP + within

    key_places = gl.allocate_shared_memory(keys.dtype.element_ty, [2, BLOCK_N, WIDTH], SHARED)
    value_places = gl.allocate_shared_memory(keys.dtype.element_ty, [2, BLOCK_N, VALUE], SHARED)
    keys += key_head.to(gl.int64) * key_head_stride
    values += key_head.to(gl.int64) * value_head_stride
    ready += before.to(gl.int64) * ready_stride + key_head * TURNED
    slots += start
    offsets = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))

    top = gl.full([BLOCK_M], -float("inf"), gl.float32, ROWS)
    total = gl.full([BLOCK_M], 0.0, gl.float32, ROWS)
    acc = gl.full([BLOCK_M, VALUE], 0.0, gl.float32, SUMS)
    empty = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORES)
    if begin < stop:
        # What lies behind the end is read from the last key: it is there, and its weight is 0.
        index = gl.minimum(offsets, stop - 1)
        slot = gl.load(slots + index).to(gl.int64)
        ready_rows = index.to(gl.int64) * ready_stride
        _copy_keys(keys, slot * key_stride, ready, ready_rows, key_places.index(0), TURNED, WIDTH, COPY)
        async_copy.commit_group()
        _copy_values(values, slot * value_stride, value_places.index(0), VALUE, COPY)
        index = gl.minimum(offsets + BLOCK_N, stop - 1)
        slot = gl.load(slots + index)
        key_rows, ready_rows = slot.to(gl.int64) * key_stride, index.to(gl.int64) * ready_stride
        _copy_keys(keys, key_rows, ready, ready_rows, key_places.index(1), TURNED, WIDTH, COPY)
        async_copy.commit_group()
        following = gl.load(slots + gl.minimum(offsets + 2 * BLOCK_N, stop - 1))

        # Queries while keys are on their way.
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
        q_heads = block % num_blocks * HEADS + rows % HEADS
        is_asking = (rows < count * HEADS) & (q_heads < GROUP)
        q_token = gl.where(is_asking, first + rows // HEADS, 0).to(gl.int64)
        positions = gl.load(token_positions + q_token, mask=is_asking, other=0)
        asked = gl.allocate_shared_memory(keys.dtype.element_ty, [BLOCK_M, WIDTH], SHARED)
        q_rows = q_token * q_stride + (key_head * GROUP + q_heads) * q_head_stride
        _store_queries(q, q_rows, is_asking, positions, cos, sin, asked, HALF, WIDTH, COPY)
        # Keys up to the last that a row sees, in this part; those before `clear` every row sees.
        last = gl.minimum(gl.load(token_positions + token, mask=valid, other=2147483646), stop - 1)
        clear = gl.min(last, 0) + 1
        async_copy.wait_group(1)
        fence_async_shared()
        scores = warpgroup_mma(asked, key_places.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        weights, top, total, shrink = _weigh(scores, top, total, last, begin, clear, scale, BLOCK_N, SCORES)
        weights = gl.convert_layout(weights.to(keys.dtype.element_ty), LEFT)
        side = 0
        for here in range(begin + BLOCK_N, stop, BLOCK_N):
            async_copy.wait_group(0)
            fence_async_shared()
            # Values of the block whose keys are asked now, and keys of the one after.
            value_rows = slot.to(gl.int64) * value_stride
            slot = following
            index = gl.minimum(here - begin + BLOCK_N + offsets, stop - 1)
            key_rows, ready_rows = slot.to(gl.int64) * key_stride, index.to(gl.int64) * ready_stride
            next_scores = warpgroup_mma(
                asked, key_places.index(1 - side).permute((1, 0)), empty, use_acc=False, is_async=True
            )
            _copy_values(values, value_rows, value_places.index(1 - side), VALUE, COPY)
            _copy_keys(keys, key_rows, ready, ready_rows, key_places.index(side), TURNED, WIDTH, COPY)
            async_copy.commit_group()
            sums = warpgroup_mma(weights, value_places.index(side), acc, is_async=True)
            following = gl.load(slots + gl.minimum(here - begin + 2 * BLOCK_N + offsets, stop - 1))
            scores = warpgroup_mma_wait(1, [next_scores])
            next_weights, top, total, shrink = _weigh(scores, top, total, last, here, clear, scale, BLOCK_N, SCORES)
            next_weights = gl.convert_layout(next_weights.to(keys.dtype.element_ty), LEFT)
            acc = warpgroup_mma_wait(0, [sums])
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            weights = next_weights
            side = 1 - side
        async_copy.wait_group(0)
        fence_async_shared()
        acc = warpgroup_mma(weights, value_places.index(side), acc)

    has_seen = total > 0
    share = gl.where(has_seen, 1.0 / total, 0.0)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
    channels = gl.arange(0, VALUE, gl.SliceLayout(0, SUMS))[None, :]
    # Asked even where no tile is split: what is stored then is compiled as it is elsewhere.
    if gl.load(tile_parts + tile) > 1:
        rows = part.to(gl.int64) * (TILE * KEY_HEADS * GROUP) + places // HEADS * (KEY_HEADS * GROUP) + head
        log = gl.where(has_seen, top + gl.log2(total), -float("inf"))
        gl.store(logs + rows, log.to(logs.dtype.element_ty), mask=valid)
        rows = gl.convert_layout(gl.where(valid & has_seen, rows * VALUE, -1), gl.SliceLayout(1, SUMS))[:, None]
        gl.store(parts + rows + channels, acc.to(parts.dtype.element_ty), mask=(rows >= 0) & (channels >= 0))
    else:
        rows = gl.where(valid, token * out_stride + head * out_head_stride, -1)
        rows = gl.convert_layout(rows, gl.SliceLayout(1, SUMS))[:, None]
        gl.store(out + rows + channels, acc.to(out.dtype.element_ty), mask=(rows >= 0) & (channels >= 0))
