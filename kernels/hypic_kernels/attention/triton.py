"""Attention to the keys of chains, read where they lie: a program per tile, key head and part of the keys.

The heads that share a key stand in one tile beside each other, so that a key is read and turned once for all of them.
What is computed stands in ``reference.py``; why it is arranged so, in README.md; how it is launched, in
``launching.py``.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl

from hypic_kernels.attention.jit import jit

_NO_POSITION = tl.constexpr(2**31 - 1)


@jit
def _flat(
    base: tl.tensor, rows: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """``[n, BLOCK]``: channels of ``n`` rows that begin at ``base + rows``; zero where masked out."""
    channels = tl.arange(0, BLOCK)[None, :]
    places = base + rows[:, None] + channels
    if WIDTH < BLOCK:
        inside = channels < WIDTH
        tile = tl.load(places, mask=inside & mask[:, None] if MASKED else inside, other=0.0)
    elif MASKED:
        tile = tl.load(places, mask=mask[:, None], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@jit
def _upright(
    base: tl.tensor, rows: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """``_flat`` transposed, ``[BLOCK, n]``."""
    channels = tl.arange(0, BLOCK)[:, None]
    places = base + rows[None, :] + channels
    if WIDTH < BLOCK:
        inside = channels < WIDTH
        tile = tl.load(places, mask=inside & mask[None, :] if MASKED else inside, other=0.0)
    elif MASKED:
        tile = tl.load(places, mask=mask[None, :], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@jit
def _turned(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, TURNS: tl.constexpr) -> tl.tensor:
    """Both halves turned in fp32 and side by side in a new axis, the first."""
    if TURNS:
        one, two = first.to(tl.float32), second.to(tl.float32)
        first, second = one * cos - two * sin, two * cos + one * sin
    return tl.permute(tl.join(first, second), (2, 0, 1))


@jit
def _queries(
    q: tl.tensor,
    rows: tl.tensor,
    valid: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    keys: tl.tensor,
    HALF: tl.constexpr,
    REST_A: tl.constexpr,
    REST_B: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TURNS: tl.constexpr,
    LATENT: tl.constexpr,
) -> tl.tuple:
    """The tile's queries in up to three tiles: what turns, and the rest; what there is not is ``valid``."""
    turning: tl.constexpr = REST_A + REST_B if LATENT else 0
    resting: tl.constexpr = 0 if LATENT else 2 * HALF
    turned, rest_a, rest_b = valid, valid, valid
    if HALF > 0:
        first = _flat(q + turning, rows, valid, HALF, BLOCK_HALF, True)
        second = _flat(q + turning + HALF, rows, valid, HALF, BLOCK_HALF, True)
        angles = tl.where(valid, positions, 0) * HALF
        c, s = valid, valid
        if TURNS:
            c = _flat(cos, angles, valid, HALF, BLOCK_HALF, False)
            s = _flat(sin, angles, valid, HALF, BLOCK_HALF, False)
        both = tl.permute(_turned(first, second, c, s, TURNS), (1, 0, 2))
        turned = tl.reshape(both, (first.shape[0], 2 * BLOCK_HALF)).to(keys.dtype.element_ty)
    if REST_A > 0:
        rest_a = _flat(q + resting, rows, valid, REST_A, BLOCK_A, True).to(keys.dtype.element_ty)
    if REST_B > 0:
        rest_b = _flat(q + resting + REST_A, rows, valid, REST_B, BLOCK_B, True).to(keys.dtype.element_ty)
    return turned, rest_a, rest_b


@jit
def _step(
    turned: tl.tensor,
    rest_a: tl.tensor,
    rest_b: tl.tensor,
    acc_a: tl.tensor,
    acc_b: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    ready: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    ready_stride: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    positions: tl.tensor,
    scale: tl.tensor,
    HALF: tl.constexpr,
    REST_A: tl.constexpr,
    REST_B: tl.constexpr,
    VALUE_A: tl.constexpr,
    VALUE_B: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_VA: tl.constexpr,
    BLOCK_VB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_KEY_POSITIONS: tl.constexpr,
    LATENT: tl.constexpr,
    IS_READY: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """``BLOCK_N`` keys from ``start``; ``MASKED`` where some lie behind ``stop`` or behind a query."""
    indices = start + tl.arange(0, BLOCK_N)
    known = indices < stop
    if MASKED:
        slot = tl.load(slots + indices, mask=known, other=0).to(tl.int64)
    else:
        slot = tl.load(slots + indices).to(tl.int64)
    key_rows, value_rows = slot * key_stride, slot * value_stride
    value_a = _flat(values, value_rows, known, VALUE_A, BLOCK_VA, MASKED)
    value_b = value_a
    if VALUE_B > 0:
        value_b = _flat(values + VALUE_A, value_rows, known, VALUE_B, BLOCK_VB, MASKED)

    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if IS_READY:
        both = _upright(ready, indices.to(tl.int64) * ready_stride, known, 2 * BLOCK_HALF, 2 * BLOCK_HALF, MASKED)
        scores = tl.dot(turned, both, acc=scores, input_precision=PRECISION)
    elif HALF > 0:
        one = _upright(keys, key_rows, known, HALF, BLOCK_HALF, MASKED)
        two = _upright(keys + HALF, key_rows, known, HALF, BLOCK_HALF, MASKED)
        c, s = known, known
        if TURNS:
            turns = indices
            if HAS_KEY_POSITIONS:
                turns = tl.load(key_positions + indices, mask=known, other=0)
            elif MASKED:
                turns = tl.where(known, indices, 0)
            c = _upright(cos, turns * HALF, known, HALF, BLOCK_HALF, False)
            s = _upright(sin, turns * HALF, known, HALF, BLOCK_HALF, False)
        both = tl.reshape(_turned(one, two, c, s, TURNS), (2 * BLOCK_HALF, BLOCK_N))
        scores = tl.dot(turned, both.to(keys.dtype.element_ty), acc=scores, input_precision=PRECISION)
    if LATENT:
        scores = tl.dot(rest_a, tl.trans(value_a), acc=scores, input_precision=PRECISION)
        if REST_B > 0:
            scores = tl.dot(rest_b, tl.trans(value_b), acc=scores, input_precision=PRECISION)
    else:
        if REST_A > 0:
            key = _upright(keys + 2 * HALF, key_rows, known, REST_A, BLOCK_A, MASKED)
            scores = tl.dot(rest_a, key, acc=scores, input_precision=PRECISION)
        if REST_B > 0:
            key = _upright(keys + 2 * HALF + REST_A, key_rows, known, REST_B, BLOCK_B, MASKED)
            scores = tl.dot(rest_b, key, acc=scores, input_precision=PRECISION)

    if MASKED:
        scores = tl.where(known[None, :] & (indices[None, :] <= positions[:, None]), scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = higher
    if MASKED:
        # A row that has seen nothing yet: -inf less -inf is not a number.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(values.dtype.element_ty)
    acc_a = tl.dot(weights, value_a, acc=acc_a * shrink[:, None], input_precision=PRECISION)
    if VALUE_B > 0:
        acc_b = tl.dot(weights, value_b, acc=acc_b * shrink[:, None], input_precision=PRECISION)
    return acc_a, acc_b, total, higher


@jit
def _write(
    out: tl.tensor,
    rows: tl.tensor,
    acc_a: tl.tensor,
    acc_b: tl.tensor,
    written: tl.tensor,
    VALUE_A: tl.constexpr,
    VALUE_B: tl.constexpr,
    BLOCK_VA: tl.constexpr,
    BLOCK_VB: tl.constexpr,
) -> None:
    """Rows of both pieces of values."""
    channels = tl.arange(0, BLOCK_VA)[None, :]
    places, inside = out + rows[:, None] + channels, written[:, None] & (channels < VALUE_A)
    tl.store(places, acc_a.to(out.dtype.element_ty), mask=inside)
    if VALUE_B > 0:
        channels = tl.arange(0, BLOCK_VB)[None, :]
        places, inside = out + VALUE_A + rows[:, None] + channels, written[:, None] & (channels < VALUE_B)
        tl.store(places, acc_b.to(out.dtype.element_ty), mask=inside)


@jit
def _attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    ready: tl.tensor,
    slots: tl.tensor,
    key_positions: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    token_positions: tl.tensor,
    tile_chain: tl.tensor,
    tile_first: tl.tensor,
    tile_count: tl.tensor,
    tile_parts: tl.tensor,
    part_tile: tl.tensor,
    part_begin: tl.tensor,
    part_end: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    logs: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    ready_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    num_chains: tl.tensor,
    scale: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST_A: tl.constexpr,
    REST_B: tl.constexpr,
    VALUE_A: tl.constexpr,
    VALUE_B: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_VA: tl.constexpr,
    BLOCK_VB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_KEY_POSITIONS: tl.constexpr,
    LATENT: tl.constexpr,
    IS_READY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One part of a tile, ``HEADS`` heads that share a key."""
    num_blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    part = program // (KEY_HEADS * num_blocks)
    tile = tl.load(part_tile + part)
    if tile < 0:
        return
    block = program % (KEY_HEADS * num_blocks)
    key_head = block // num_blocks
    chain = tl.load(tile_chain + tile)
    count = tl.load(tile_count + tile)
    places = tl.arange(0, BLOCK_M)
    within = block % num_blocks * HEADS + places % HEADS
    valid = (places < count * HEADS) & (within < GROUP)
    token = tl.where(valid, tl.load(tile_first + tile) + places // HEADS, 0).to(tl.int64)
    head = key_head * GROUP + within
    positions = tl.load(token_positions + token, mask=valid, other=-1)
    q_rows = token * q_stride + head * q_head_stride
    keys += key_head.to(tl.int64) * key_head_stride
    values += key_head.to(tl.int64) * value_head_stride
    turned, rest_a, rest_b = _queries(
        q, q_rows, valid, positions, cos, sin, keys,
        HALF, REST_A, REST_B, BLOCK_HALF, BLOCK_A, BLOCK_B, TURNS, LATENT,
    )  # fmt: skip

    # Keys before `clear` are seen by every query of the tile.
    begin, stop = tl.load(part_begin + part), tl.load(part_end + part)
    clear = tl.min(tl.where(valid, positions, _NO_POSITION - 1), 0) + 1
    middle = begin + tl.maximum(0, tl.minimum(stop, clear) - begin) // BLOCK_N * BLOCK_N
    start = tl.load(starts + chain)
    slots += start
    key_positions += start
    if IS_READY:
        before = tl.zeros((BLOCK_C,), tl.int32)
        for others in range(0, chain, BLOCK_C):
            earlier = others + tl.arange(0, BLOCK_C)
            before += tl.load(lengths + earlier, mask=(earlier < chain) & (earlier < num_chains), other=0)
        ready += tl.sum(before, 0).to(tl.int64) * ready_stride + key_head * (2 * BLOCK_HALF)

    acc_a = tl.zeros((BLOCK_M, BLOCK_VA), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc_b = total
    if VALUE_B > 0:
        acc_b = tl.zeros((BLOCK_M, BLOCK_VB), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    for here in tl.range(begin, middle, BLOCK_N, num_stages=STAGES):
        acc_a, acc_b, total, top = _step(
            turned, rest_a, rest_b, acc_a, acc_b, total, top,
            keys, values, slots, key_positions, cos, sin, ready,
            key_stride, value_stride, ready_stride, here, stop, positions, scale,
            HALF, REST_A, REST_B, VALUE_A, VALUE_B, BLOCK_HALF, BLOCK_A, BLOCK_B, BLOCK_VA, BLOCK_VB,
            BLOCK_M, BLOCK_N, TURNS, HAS_KEY_POSITIONS, LATENT, IS_READY, PRECISION, False,
        )  # fmt: skip
    for here in tl.range(middle, stop, BLOCK_N, num_stages=STAGES):
        acc_a, acc_b, total, top = _step(
            turned, rest_a, rest_b, acc_a, acc_b, total, top,
            keys, values, slots, key_positions, cos, sin, ready,
            key_stride, value_stride, ready_stride, here, stop, positions, scale,
            HALF, REST_A, REST_B, VALUE_A, VALUE_B, BLOCK_HALF, BLOCK_A, BLOCK_B, BLOCK_VA, BLOCK_VB,
            BLOCK_M, BLOCK_N, TURNS, HAS_KEY_POSITIONS, LATENT, IS_READY, PRECISION, True,
        )  # fmt: skip

    has_seen = total > 0
    share = tl.where(has_seen, 1.0 / total, 0.0)
    acc_a *= share[:, None]
    if VALUE_B > 0:
        acc_b *= share[:, None]
    is_part = False
    if IS_SPLIT:
        is_part = tl.load(tile_parts + tile) > 1
    if is_part:
        rows = part.to(tl.int64) * (TILE * KEY_HEADS * GROUP) + places // HEADS * (KEY_HEADS * GROUP) + head
        # A part without keys is known by its logarithm; its sum is never read.
        tl.store(logs + rows, tl.where(has_seen, top + tl.log2(total), -float("inf")), mask=valid)
        rows, written = rows * (VALUE_A + VALUE_B), valid & has_seen
        _write(parts, rows, acc_a, acc_b, written, VALUE_A, VALUE_B, BLOCK_VA, BLOCK_VB)
        return
    rows = token * out_stride + head * out_head_stride
    _write(out, rows, acc_a, acc_b, valid, VALUE_A, VALUE_B, BLOCK_VA, BLOCK_VB)
