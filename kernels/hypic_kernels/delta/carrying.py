"""States and transitions of rows, chunk after chunk, in one launch, and their maps in another.

With running sums ``G`` (to base 2), ``w`` and ``u`` of every chunk (``solving.py``), a program takes some columns of a
row's state through ``v' = u - w S`` and ``S = 2^G_C S + k^T (2^(G_C - G) v')``, or some columns of a fold's transition,
which is the same walk from the identity without ``u``, of which the end alone is written. Products round their operands
to the type of k and sums are float32, as in fla's walk, whose place this takes where a row is kept in parts: there
states are wanted in the middle of a row, with all their digits.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import CarryConfig, carry_config, padded
from hypic_kernels.launch import Launch, jit_for_any
from hypic_kernels.rows import CHUNK, Rows


@jit_for_any("num_states", "num_marks")
def _carry(
    k: tl.tensor,
    sums: tl.tensor,
    w: tl.tensor,
    u: tl.tensor,
    cu_seqlens: tl.tensor,
    chunk_indices: tl.tensor,
    chunk_offsets: tl.tensor,
    marks: tl.tensor,
    folds: tl.tensor,
    initial: tl.tensor,
    slots: tl.tensor,
    before: tl.tensor,
    values: tl.tensor,
    kept: tl.tensor,
    transitions: tl.tensor,
    transition_slots: tl.tensor,
    num_states: tl.tensor,
    num_marks: tl.tensor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """The first ``num_states`` programs take states, the others transitions."""
    program = tl.program_id(0)
    is_state = program < num_states
    number = tl.where(is_state, program, program - num_states)
    blocks = tl.where(is_state, (V + BLOCK - 1) // BLOCK, (K + BLOCK - 1) // BLOCK)
    item, head = number // blocks // H, number // blocks % H
    channels, steps = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
    columns = number % blocks * BLOCK + steps
    in_keys, is_column = channels < K, steps >= 0
    if V % BLOCK != 0 or K % BLOCK != 0:
        is_column = columns < tl.where(is_state, V, K)
    inside = in_keys[:, None] & is_column[None, :]
    # Strides are known when this is compiled, so that addresses are few numbers and constants beside them.
    cells = channels[:, None] * V + columns[None, :]
    if is_state:
        first_chunk, end_chunk = tl.load(chunk_offsets + item), tl.load(chunk_offsets + item + 1)
        slot = tl.load(slots + item).to(tl.int64)
        state = tl.load(initial + (slot * H + head) * (K * V) + cells, mask=inside, other=0.0).to(tl.float32)
    else:
        first_chunk, end_chunk = tl.load(folds + 2 * item), tl.load(folds + 2 * item + 1)
        state = tl.where(channels[:, None] == columns[None, :], 1.0, 0.0)
    row = tl.load(chunk_indices + 2 * first_chunk)
    begin = tl.load(cu_seqlens + row) + tl.load(chunk_indices + 2 * first_chunk + 1) * CHUNK
    left = tl.load(cu_seqlens + row + 1) - begin  # places from here to the row's end

    # Offsets within a chunk are small numbers and the same for all; where a chunk begins is one number.
    kind = k.dtype.element_ty
    place, within = begin.to(tl.int64), tl.arange(0, CHUNK)
    w += (place * H + head) * K
    k += (place * (H // GROUP) + head // GROUP) * K
    u += (place * H + head) * V
    values += (place * H + head) * V
    sums += place * H + head
    before += (first_chunk.to(tl.int64) * H + head) * (K * V)
    w_cells, u_cells = within[:, None] * (H * K) + channels[None, :], within[:, None] * (H * V) + columns[None, :]
    k_cells = within[None, :] * (H // GROUP * K) + channels[:, None]
    for chunk in tl.range(first_chunk, end_chunk, num_stages=NUM_STAGES):
        real = within < left
        tile = tl.load(w + w_cells, mask=real[:, None] & in_keys[None, :], other=0.0)
        is_value = real[:, None] & is_column[None, :] & is_state
        value = tl.load(u + u_cells, mask=is_value, other=0.0).to(tl.float32)
        narrow = state.to(kind)
        if is_state:
            tl.store(before + cells, narrow.to(before.dtype.element_ty), mask=inside)
            mark = tl.load(marks + chunk)
            if mark >= 0:
                tl.store(kept + (mark.to(tl.int64) * H + head) * (K * V) + cells, state, mask=inside)
        value -= tl.dot(tile, narrow, input_precision=INNER)
        if is_state:
            tl.store(values + u_cells, value.to(values.dtype.element_ty), mask=is_value)
        last = tl.load(sums + (tl.minimum(left, CHUNK) - 1) * H)
        sum = tl.load(sums + within * H, mask=real, other=0.0)
        value *= tl.where(real, tl.exp2(last - sum), 0.0)[:, None]
        keys = tl.load(k + k_cells, mask=real[None, :] & in_keys[:, None], other=0.0)
        state = tl.dot(keys, value.to(kind), acc=state * tl.exp2(last), input_precision=INNER)
        w += CHUNK * H * K
        k += CHUNK * (H // GROUP) * K
        u += CHUNK * H * V
        values += CHUNK * H * V
        sums += CHUNK * H
        before += H * (K * V)
        left -= CHUNK
    if is_state:
        tl.store(kept + ((num_marks + item).to(tl.int64) * H + head) * (K * V) + cells, state, mask=inside)
    else:
        slot = tl.load(transition_slots + item).to(tl.int64)
        square = channels[:, None] * K + columns[None, :]
        tl.store(transitions + (slot * H + head) * (K * K) + square, state, mask=inside)


def carry(
    k: Tensor,
    made: tuple[Tensor, Tensor, Tensor],
    rows: Rows,
    states: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor],
    transitions: tuple[Tensor, Tensor],
    inner: str = "tf32",
    config: CarryConfig | None = None,
) -> Launch:
    """Of ``k [1, n, Hk, K]`` and ``made``, sums, w and u as ``solve`` leaves them, from ``states``, a pool
    ``[S, Hv, K, V]`` and slots ``[R]`` in it.

    ``found``: states before chunks ``[1, M, Hv, K, V]`` and corrected values ``[1, n, Hv, V]``, both as fla's outputs
    take them, and states that are kept, ``[num_marks + R, Hv, K, V]`` in float32: of ``rows.marks``, then rows' ends.
    ``transitions``: where they go ``[S', Hv, K, K]``, and slots ``[F]`` in it.
    """
    sums, w, u = made
    config = config or carry_config(k.shape[3])
    num_heads, key_dim, value_dim = *w.shape[2:], u.shape[3]
    num_states = rows.num_rows * num_heads * -(-value_dim // config.block)
    num_transitions = rows.num_folds * num_heads * -(-key_dim // config.block)
    arguments = (
        k, sums, w, u, rows.cu_seqlens, rows.chunk_indices, rows.chunk_offsets, rows.marks, rows.folds, *states,
        *found, *transitions, num_states, rows.num_marks,
    )  # fmt: skip
    constants = {
        "H": num_heads, "GROUP": num_heads // k.shape[2], "K": key_dim, "V": value_dim, "CHUNK": CHUNK,
        "BLOCK_K": padded(key_dim), "BLOCK": config.block, "NUM_STAGES": config.num_stages, "INNER": inner,
    }  # fmt: skip
    return Launch(_carry, (num_states + num_transitions,), arguments, constants, config.num_warps)


@jit_for_any("num_folds")
def _settle(
    kept: tl.tensor,
    transitions: tl.tensor,
    transition_slots: tl.tensor,
    ends: tl.tensor,
    fold_slots: tl.tensor,
    write_places: tl.tensor,
    write_slots: tl.tensor,
    states: tl.tensor,
    num_folds: tl.tensor,
    H: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """The first ``num_folds`` rows of programs make end states, the others copy."""
    item, head, block = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    channels, columns = tl.arange(0, BLOCK_K), block * BLOCK + tl.arange(0, BLOCK)
    cells = channels[:, None] * V + columns[None, :]
    inside = (channels < K)[:, None] & (columns < V)[None, :]
    if item < num_folds:
        slot = tl.load(fold_slots + item).to(tl.int64)
        place = tl.load(ends + 2 * item + 1).to(tl.int64)
    else:
        slot = tl.load(write_slots + item - num_folds).to(tl.int64)
        place = tl.load(write_places + item - num_folds).to(tl.int64)
    state = tl.load(kept + (place * H + head) * (K * V) + cells, mask=inside, other=0.0)
    if item < num_folds:
        start = tl.load(ends + 2 * item).to(tl.int64)
        source = kept + (start * H + head) * (K * V)
        matrix = transitions + (tl.load(transition_slots + item).to(tl.int64) * H + head) * (K * K)
        product = tl.zeros((BLOCK_K, BLOCK), tl.float32)
        for first in tl.range(0, K, BLOCK, num_stages=1):
            inner = first + tl.arange(0, BLOCK)
            left = matrix + channels[:, None] * K + inner[None, :]
            left = tl.load(left, mask=(channels < K)[:, None] & (inner < K)[None, :], other=0.0)
            right = source + inner[:, None] * V + columns[None, :]
            right = tl.load(right, mask=(inner < K)[:, None] & (columns < V)[None, :], other=0.0)
            product = tl.dot(left, right, acc=product, input_precision=INNER)
        state -= product
    target = states + (slot * H + head) * (K * V) + cells
    tl.store(target, state.to(states.dtype.element_ty), mask=inside & (slot >= 0))


def settle(
    kept: Tensor,
    transitions: tuple[Tensor, Tensor],
    ends: Tensor,
    fold_slots: Tensor,
    writes: tuple[Tensor, Tensor],
    states: Tensor,
    inner: str = "tf32x3",
    block: int = 32,
) -> Launch:
    """Into slots of ``states [S, Hv, K, V]``: for every fold ``kept[end] - T kept[start]``, ``ends [F, 2]`` being start
    and end, and what ``writes`` says, places in ``kept`` and slots."""
    num_heads, key_dim, value_dim = kept.shape[1:]
    places, slots = writes
    arguments = (kept, *transitions, ends, fold_slots, places, slots, states, fold_slots.shape[0], num_heads)
    constants = {"K": key_dim, "V": value_dim, "BLOCK_K": padded(key_dim), "BLOCK": block, "INNER": inner}
    grid = ((fold_slots.shape[0] + places.shape[0]) * num_heads, -(-value_dim // block))
    return Launch(_settle, grid, arguments, constants, 4)
