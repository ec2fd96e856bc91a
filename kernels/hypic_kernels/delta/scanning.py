"""``scan`` as a kernel: chains of chunks and of stored maps walked in one launch, outputs written on the way.

As in ``hypic_kernels.compose`` a program takes a chain, a head and a block of columns of the state, and keeps it on the
chip from the first element to the last. A chunk is applied by its own tokens: products with k and q as they are stored,
and with two ``[C, C]`` matrices that ``triton.py`` solved for. Only a stored map is a dense product. What it computes
stands in ``reference.py``; the algebra in README.md.

Loads are issued an element ahead, by hand: loops are not pipelined by the compiler, which has miscompiled such products
(see ``LiftConfig``). A stored transition is on its way to registers from the moment the last one has left them.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import torch
import triton.language as tl
from torch import Tensor

from hypic_kernels.compose.chains import IDENTITY, Chains
from hypic_kernels.delta.layout import ScanConfig, padded
from hypic_kernels.delta.parts import gated, halves, thirds
from hypic_kernels.delta.rule import GatedNorm, ScanPrecision
from hypic_kernels.launch import Launch, jit, jit_for_any

# A kernel sees no other globals than these.
_IDENTITY = tl.constexpr(IDENTITY)


@jit
def _entry(elements: tl.tensor, number: tl.tensor, end: tl.tensor) -> tl.tuple:
    """Source, transition, place and output of an element; behind the last one a source that is none."""
    row, inside = elements + number * 4, number < end
    source = tl.load(row, mask=inside, other=-1)
    transition = tl.load(row + 1, mask=inside, other=-1)
    place = tl.load(row + 2, mask=inside, other=0)
    return source, transition, place, tl.load(row + 3, mask=inside, other=-1)


@jit
def _tokens(chunks: tl.tensor, source: tl.tensor, place: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Token numbers of a chunk, -1 if the element is none."""
    return tl.load(chunks + tl.cast(place, tl.int64) * C + tl.arange(0, C), mask=source == 0, other=-1)


@jit
def _chunk(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    solved: tl.tensor,
    source: tl.tensor,
    place: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    head: tl.tensor,
    q_token: tl.tensor,
    k_token: tl.tensor,
    v_token: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tuple:
    """What one chunk needs: q, k, v of its tokens, two solved matrices, and three numbers per token."""
    places = tl.arange(0, C)
    real = (tokens >= 0) & (tokens < N)
    token = tl.where(real, tokens, 0).to(tl.int64)[:, None]
    along = tl.arange(0, BLOCK_K)[None, :]
    inside = real[:, None] & (along < K)
    k_tile = tl.load(k + token * k_token + along, mask=inside, other=0.0)
    q_tile = tl.load(q + token * q_token + along, mask=inside, other=0.0)
    v_tile = tl.load(v + token * v_token + columns, mask=real[:, None] & (columns < V), other=0.0)
    is_chunk = source == 0
    own = solved + (tl.cast(place, tl.int64) * H + head) * (2 * C * C + 3 * C)
    cells = own + places[:, None] * C + places[None, :]
    added = tl.load(cells, mask=is_chunk, other=0.0)
    answered = tl.load(cells + C * C, mask=is_chunk, other=0.0)
    numbers = own + 2 * C * C + places
    k_growth = tl.load(numbers, mask=is_chunk, other=0.0)
    q_growth = tl.load(numbers + C, mask=is_chunk, other=0.0)
    total = tl.load(own + 2 * C * C + 3 * C - 1, mask=is_chunk, other=0.0)
    return q_tile, k_tile, v_tile, added, answered, k_growth, q_growth, total


@jit
def _parted(wide: tl.tensor, PARTS: tl.constexpr) -> tl.tuple:
    """An fp32 number as so many bf16 numbers, or as it is."""
    if PARTS == 3:
        parts = thirds(wide)
    elif PARTS == 2:
        parts = halves(wide)
    else:
        parts = (wide,)
    return parts


@jit
def _less(
    total: tl.tensor,
    stored: tl.tensor,
    parts: tl.tuple,
    factor: tl.tensor,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``total - factor (stored state)`` of a state in ``PARTS``, added apart: no product waits for another."""
    if PARTS == 1:
        total -= tl.dot(stored.to(tl.float32), parts[0], input_precision=PRECISION) * factor
    else:
        if PARTS == 3:
            total -= tl.dot(stored, parts[2]) * factor
        total -= tl.dot(stored, parts[1]) * factor
        total -= tl.dot(stored, parts[0]) * factor
    return total


@jit
def _more(
    total: tl.tensor, stored: tl.tensor, parts: tl.tuple, PARTS: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """``total + stored wide`` of a number in ``PARTS``."""
    if PARTS == 1:
        total = tl.dot(stored.to(tl.float32), parts[0], acc=total, input_precision=PRECISION)
    else:
        if PARTS == 3:
            total = tl.dot(stored, parts[2], acc=total)
        total = tl.dot(stored, parts[1], acc=total)
        total = tl.dot(stored, parts[0], acc=total)
    return total


@jit
def _ahead(
    transitions: tl.tensor,
    end_states: tl.tensor,
    matrix: tl.tensor,
    vector: tl.tensor,
    held: tl.tensor,
    number: tl.tensor,
    source_1: tl.tensor,
    transition_1: tl.tensor,
    place_1: tl.tensor,
    source_2: tl.tensor,
    transition_2: tl.tensor,
    place_2: tl.tensor,
    head: tl.tensor,
    H: tl.tensor,
    columns: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tuple:
    """The map of the first stored element of the two behind ``number``, unless ``held`` says that it is here already.

    What is masked out stays as it is, so nothing waits for a load before its product.
    """
    is_first, is_second = source_1 == 1, (source_1 != 1) & (source_2 == 1)
    wanted = tl.where(is_first, number + 1, tl.where(is_second, number + 2, held))
    is_new = wanted != held
    transition, place = tl.where(is_first, transition_1, transition_2), tl.where(is_first, place_1, place_2)
    rows, along = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_K)[None, :]
    is_stored = is_new & (transition >= 0)
    row = tl.where(is_stored, transition, 0).to(tl.int64) * H + head
    mask = (rows < K) & (along < K) & is_stored
    matrix = tl.load(transitions + row * (K * K) + rows * K + along, mask=mask, other=matrix)
    row = tl.where(is_new, place, 0).to(tl.int64) * H + head
    mask = (rows < K) & (columns < V) & is_new
    vector = tl.load(end_states + row * (K * V) + rows * V + columns, mask=mask, other=vector)
    return matrix, vector, wanted


@jit
def _parts(matrix: tl.tensor, IS_BF16: tl.constexpr, PRECISION: tl.constexpr) -> tl.tuple:
    """A stored transition as the operands of its product."""
    if IS_BF16 or PRECISION == "ieee" or PRECISION == "tf32x3":
        parts = matrix, matrix, matrix
    elif PRECISION == "bf16x6":
        parts = thirds(matrix.to(tl.float32))
    else:
        first, second = halves(matrix.to(tl.float32))
        parts = first, second, second
    return parts


@jit
def _applied(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    state: tl.tensor,
    IS_BF16: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``T state`` of a transition in parts; of one that is stored in bfloat16 (``IS_BF16``) there is only one."""
    if PRECISION == "ieee" or PRECISION == "tf32x3":
        total = tl.dot(first.to(tl.float32), state, input_precision=PRECISION)
    else:
        parts = _parted(state, 3 if PRECISION == "bf16x6" else 2)
        total = tl.zeros(state.shape, tl.float32)
        # Part by part of the transition, so that no two of them are in registers at once.
        if not IS_BF16:
            if PRECISION == "bf16x6":
                total = tl.dot(third, parts[0], acc=total)
                total = tl.dot(second, parts[1], acc=total)
            total = tl.dot(second, parts[0], acc=total)
        if PRECISION == "bf16x6":
            total = tl.dot(first, parts[2], acc=total)
        total = tl.dot(first, parts[1], acc=total)
        total = tl.dot(first, parts[0], acc=total)
    return total


@jit_for_any("N")
def _scan(
    cu_elements: tl.tensor,
    elements: tl.tensor,
    initial: tl.tensor,
    initial_index: tl.tensor,
    before: tl.tensor,
    final: tl.tensor,
    final_slots: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    solved: tl.tensor,
    chunks: tl.tensor,
    transitions: tl.tensor,
    end_states: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    STORED: tl.constexpr,
    SLOTTED: tl.constexpr,
    IS_BF16: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One chain, one head, ``BLOCK_V`` columns. Neighbours share a head, so that they find its transitions in L2."""
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head, chain = (program // num_blocks) % H, program // num_blocks // H
    rows = tl.arange(0, BLOCK_K)[:, None]
    columns = (program % num_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (rows < K) & (columns < V)
    cells = rows * V + columns
    q_from, k_from, v_from = q + (head // GROUP) * q_head, k + (head // GROUP) * k_head, v + head * v_head

    start, end = tl.load(cu_elements + chain), tl.load(cu_elements + chain + 1)
    slot = tl.load(initial_index + chain)
    place = initial + (slot.to(tl.int64) * H + head) * (K * V)
    state = tl.load(place + cells, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    source, transition, place, output = _entry(elements, start, end)
    source_1, transition_1, place_1, output_1 = _entry(elements, start + 1, end)
    source_2, transition_2, place_2, output_2 = _entry(elements, start + 2, end)
    tokens, tokens_1 = _tokens(chunks, source, place, C), _tokens(chunks, source_1, place_1, C)
    q_tile, k_tile, v_tile, added, answered, k_growth, q_growth, total = _chunk(
        q_from, k_from, v_from, solved, source, place, tokens, columns, N, H, head, q_token, k_token, v_token,
        K, V, C, BLOCK_K,
    )  # fmt: skip
    held = start - 1
    if STORED:
        matrix = tl.zeros((BLOCK_K, BLOCK_K), transitions.dtype.element_ty)
        vector = tl.zeros((BLOCK_K, BLOCK_V), end_states.dtype.element_ty)
        matrix, vector, held = _ahead(
            transitions, end_states, matrix, vector, held, start - 1, source, transition, place,
            source_1, transition_1, place_1, head, H, columns, K, V, BLOCK_K,
        )  # fmt: skip
    for number in tl.range(start, end, num_stages=1):
        # The table is read three elements ahead, tokens' numbers two, what they name one.
        source_3, transition_3, place_3, output_3 = _entry(elements, number + 3, end)
        tokens_2 = _tokens(chunks, source_2, place_2, C)
        q_next, k_next, v_next, added_next, answered_next, k_growth_next, q_growth_next, total_next = _chunk(
            q_from, k_from, v_from, solved, source_1, place_1, tokens_1, columns, N, H, head, q_token, k_token, v_token,
            K, V, C, BLOCK_K,
        )  # fmt: skip
        if output >= 0:
            target = before + (output.to(tl.int64) * H + head) * (K * V)
            # Places are never negative. A selection, here and below, has the compiler move numbers to another layout
            # where they are used, not at the start of every turn of the loop.
            kept = tl.where(place >= 0, state, 0.0)
            tl.store(target + cells, kept.to(before.dtype.element_ty), mask=inside)
        if source == 0:
            if STORED:
                matrix, vector, held = _ahead(
                    transitions, end_states, matrix, vector, held, number, source_1, transition_1, place_1,
                    source_2, transition_2, place_2, head, H, columns, K, V, BLOCK_K,
                )  # fmt: skip
            parts = _parted(state, NUM_PARTS)
            wanted = _less(v_tile.to(tl.float32), k_tile, parts, k_growth[:, None], NUM_PARTS, INNER)
            asked = tl.zeros((C, BLOCK_V), tl.float32)
            asked = _less(asked, q_tile, parts, -q_growth[:, None], NUM_PARTS, INNER)
            update = tl.dot(added, wanted, input_precision=INNER)
            asked += tl.dot(answered, wanted, input_precision=INNER)
            update_parts = _parted(update, NUM_PARTS)
            state = _more(state * total, tl.trans(k_tile), update_parts, NUM_PARTS, INNER)
            real = ((tokens >= 0) & (tokens < N))[:, None]
            token = tl.where(tokens >= 0, tokens, 0).to(tl.int64)[:, None]
            tl.store(
                out + token * out_token + head * out_head + columns, asked.to(out.dtype.element_ty),
                mask=real & (columns < V),
            )  # fmt: skip
        elif STORED:
            first, second, third = _parts(matrix, IS_BF16, PRECISION)
            end_state = tl.where(place >= 0, vector.to(tl.float32), 0.0)
            after = _applied(first, second, third, state, IS_BF16, PRECISION)
            matrix, vector, held = _ahead(
                transitions, end_states, matrix, vector, held, number, source_1, transition_1, place_1,
                source_2, transition_2, place_2, head, H, columns, K, V, BLOCK_K,
            )  # fmt: skip
            # Not a product with zero: what a zero transition shuts out may be NaN.
            state = tl.where(transition >= 0, after, tl.where(transition == _IDENTITY, state, 0.0)) + end_state
        source, transition, place, output = source_1, transition_1, place_1, output_1
        source_1, transition_1, place_1, output_1 = source_2, transition_2, place_2, output_2
        source_2, transition_2, place_2, output_2 = source_3, transition_3, place_3, output_3
        tokens, tokens_1 = tokens_1, tokens_2
        q_tile, k_tile, v_tile, added, answered = q_next, k_next, v_next, added_next, answered_next
        k_growth, q_growth, total = k_growth_next, q_growth_next, total_next
    slot = tl.load(final_slots + chain) if SLOTTED else chain
    place = final + (tl.cast(slot, tl.int64) * H + head) * (K * V)
    tl.store(place + cells, state.to(final.dtype.element_ty), mask=inside & (slot >= 0))


@jit_for_any("SIZE")
def _gated_norm(
    x: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    H: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    z_token: tl.tensor,
    z_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.tensor,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """``ROWS`` heads of tokens at a time."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_V)[None, :]
    token, head = rows // H, rows % H
    mask = (rows < SIZE) & (columns < V)
    value = tl.load(x + token * x_token + head * x_head + columns, mask=mask, other=0.0).to(tl.float32)
    mean = (tl.sum(value * value, axis=1) / V)[:, None]
    value = gated(value, z, token * z_token + head * z_head + columns, weight, columns, mask, mean, eps, V)
    tl.store(out + token * out_token + head * out_head + columns, value.to(out.dtype.element_ty), mask=mask)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    solved: Tensor,
    chunks: Tensor,
    chains: Chains,
    maps: tuple[Tensor, Tensor] | None,
    initial: Tensor,
    out: Tensor,
    before: Tensor,
    final: Tensor,
    final_slots: Tensor | None,
    precision: ScanPrecision,
    config: ScanConfig,
) -> Launch:
    """The twin of ``reference.scan`` over what ``triton.solve`` left in ``solved``."""
    num_heads, key_dim, value_dim = initial.shape[1:]
    transitions, end_states = maps or (initial, initial)
    num_parts = 2 if precision == "bf16x3" else 3
    if k.dtype != torch.bfloat16 or precision == "ieee":
        num_parts = 1
    arguments = (
        chains.cu_elements, chains.elements, initial, chains.initial_index, before, final,
        chains.initial_index if final_slots is None else final_slots, q, k, v, solved, chunks, transitions, end_states,
        out, q.shape[0], num_heads, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
    )  # fmt: skip
    constants = {
        "GROUP": num_heads // k.shape[1], "K": key_dim, "V": value_dim, "C": chunks.shape[1],
        "STORED": maps is not None, "SLOTTED": final_slots is not None,
        "IS_BF16": transitions.dtype == torch.bfloat16, "PRECISION": precision,
        "NUM_PARTS": num_parts, "INNER": "ieee" if precision == "ieee" else "tf32x3",
        "BLOCK_K": padded(key_dim), "BLOCK_V": config.block_v,
    }  # fmt: skip
    num_programs = chains.num_chains * num_heads * -(-value_dim // config.block_v)
    return Launch(_scan, (num_programs,), arguments, constants, config.num_warps)


def gated_norm(x: Tensor, norm: GatedNorm, out: Tensor) -> Launch:
    """The twin of ``reference.normed``."""
    num_tokens, num_heads, value_dim = x.shape
    size, rows = num_tokens * num_heads, 8
    arguments = (
        x, norm.z, norm.weight, out, num_heads,
        *x.stride()[:2], *norm.z.stride()[:2], *out.stride()[:2], norm.eps, size,
    )  # fmt: skip
    constants = {"V": value_dim, "ROWS": rows, "BLOCK_V": padded(value_dim)}
    return Launch(_gated_norm, (-(-size // rows),), arguments, constants, 4)
