"""``scan`` as a kernel: chains of chunks in factors and of stored maps walked in one launch, outputs on the way.

As in ``hypic_kernels.compose`` a program takes a chain, a head and a block of columns of the state, and keeps it on the
chip from the first element to the last. A chunk is three products of its own rank; only stored maps are dense. All
loads stand outside the branches, under masks, so that the next element's are in flight while this one is multiplied.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.compose.chains import IDENTITY, Chains
from hypic_kernels.delta.layout import ScanConfig, padded
from hypic_kernels.delta.parts import both_wide, gated
from hypic_kernels.delta.rule import Factors, GatedNorm, Precision
from hypic_kernels.launch import Launch, jit

# A kernel sees no other globals than these.
_IDENTITY = tl.constexpr(IDENTITY)


@jit
def _scan(
    cu_elements: tl.tensor,
    elements: tl.tensor,
    initial: tl.tensor,
    initial_index: tl.tensor,
    before: tl.tensor,
    final: tl.tensor,
    final_slots: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    added: tl.tensor,
    query: tl.tensor,
    offset: tl.tensor,
    total: tl.tensor,
    chunks: tl.tensor,
    transitions: tl.tensor,
    end_states: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    H: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    STORED: tl.constexpr,
    SLOTTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = (program // num_blocks) % H
    chain = program // num_blocks // H
    rows = tl.arange(0, BLOCK_K)[:, None]
    near, pair = tl.arange(0, HALF)[None, :], tl.arange(0, 2 * C)[:, None]
    places, along = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    columns = (program % num_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (rows < K) & (columns < V)
    numbers = rows * V + columns

    slot = tl.load(initial_index + chain)
    source = initial + (slot.to(tl.int64) * H + head) * (K * V)
    state = tl.load(source + numbers, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    for number in tl.range(tl.load(cu_elements + chain), tl.load(cu_elements + chain + 1), num_stages=STAGES):
        element = elements + number * 4
        is_chunk = tl.load(element) == 0
        transition = tl.load(element + 1)
        place = tl.load(element + 2)
        output = tl.load(element + 3)
        chunk = tl.where(is_chunk, place, 0).to(tl.int64)
        row = chunk * H + head
        # Rows of right and then of query: together they ask the state once. In two halves of their columns, as a
        # stored transition too: whole, their pieces for exact products would not fit into registers.
        asked = tl.where(pair < C, right + (row * C + pair) * K, query + (row * C + pair - C) * K)
        ask_first = tl.load(asked + near, mask=is_chunk & (near < K), other=0.0)
        if HALVES == 2:
            ask_second = tl.load(asked + near + HALF, mask=is_chunk & (near + HALF < K), other=0.0)
        left_tile = tl.load(left + (row * K + rows) * C + along, mask=is_chunk & (rows < K), other=0.0)
        mask = is_chunk & (columns < V)
        added_tile = tl.load(added + (row * C + places) * V + columns, mask=mask, other=0.0)
        offset_tile = tl.load(offset + (row * C + places) * V + columns, mask=mask, other=0.0)
        factor = tl.load(total + row, mask=is_chunk, other=0.0)
        token = tl.load(chunks + chunk * C + places, mask=is_chunk, other=-1)
        if STORED:
            is_stored = (is_chunk == 0) & (transition >= 0)
            matrix = tl.where(is_stored, transition, 0).to(tl.int64) * H + head
            mask = (rows < K) & (near < K) & is_stored
            first = tl.load(transitions + (matrix * K + rows) * K + near, mask=mask, other=0.0)
            if HALVES == 2:
                mask = (rows < K) & (near + HALF < K) & is_stored
                second = tl.load(transitions + (matrix * K + rows) * K + near + HALF, mask=mask, other=0.0)
            vector = tl.where(is_chunk, 0, place).to(tl.int64) * H + head
            end_state = tl.load(end_states + vector * (K * V) + numbers, mask=inside & (is_chunk == 0), other=0.0)

        target = before + (output.to(tl.int64) * H + head) * (K * V)
        tl.store(target + numbers, state.to(before.dtype.element_ty), mask=inside & (output >= 0))
        if is_chunk:
            answers = tl.zeros((2 * C, BLOCK_V), tl.float32)
            if HALVES == 2:
                upper, lower = tl.split(tl.permute(tl.reshape(state, (2, HALF, BLOCK_V)), (1, 2, 0)))
                answers = both_wide(ask_first, upper, answers, PRECISION)
                answers = both_wide(ask_second, lower, answers, PRECISION)
            else:
                answers = both_wide(ask_first, state, answers, PRECISION)
            seen, outputs = tl.split(tl.permute(tl.reshape(answers, (2, C, BLOCK_V)), (1, 2, 0)))
            state = both_wide(left_tile, added_tile - seen, state * factor, PRECISION)
            is_token = (token >= 0) & (token < N)
            places_out = out + tl.where(is_token, token, 0).to(tl.int64) * out_token + head * out_head + columns
            tl.store(places_out, (outputs + offset_tile).to(out.dtype.element_ty), mask=is_token & (columns < V))
        elif STORED:
            after = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            if HALVES == 2:
                upper, lower = tl.split(tl.permute(tl.reshape(state, (2, HALF, BLOCK_V)), (1, 2, 0)))
                after = both_wide(first.to(tl.float32), upper, after, PRECISION)
                after = both_wide(second.to(tl.float32), lower, after, PRECISION)
            else:
                after = both_wide(first.to(tl.float32), state, after, PRECISION)
            # Not a product with zero: what a zero transition shuts out may be NaN.
            state = tl.where(is_stored, after, tl.where(transition == _IDENTITY, state, 0.0))
            state += end_state.to(tl.float32)
    slot = tl.load(final_slots + chain) if SLOTTED else chain
    target = final + (tl.cast(slot, tl.int64) * H + head) * (K * V)
    tl.store(target + numbers, state.to(final.dtype.element_ty), mask=inside & (slot >= 0))


@jit
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
    chains: Chains,
    factors: Factors,
    chunks: Tensor,
    maps: tuple[Tensor, Tensor] | None,
    initial: Tensor,
    out: Tensor,
    before: Tensor,
    final: Tensor,
    final_slots: Tensor | None,
    precision: Precision,
    config: ScanConfig,
) -> Launch:
    """The twin of ``reference.scan``: fills ``out``, ``before`` and ``final``."""
    num_heads, key_dim, value_dim = initial.shape[1:]
    transitions, end_states = maps or (initial, initial)
    whole, num_halves = padded(key_dim), 2 if padded(key_dim) >= 32 else 1
    arguments = (
        chains.cu_elements, chains.elements, initial, chains.initial_index, before, final, final_slots,
        *factors, chunks, transitions, end_states, out, len(out), num_heads, *out.stride()[:2],
    )  # fmt: skip
    constants = {
        "K": key_dim, "V": value_dim, "C": chunks.shape[1], "STORED": maps is not None,
        "SLOTTED": final_slots is not None, "PRECISION": precision, "BLOCK_K": whole,
        "BLOCK_V": config.block_v, "HALF": whole // num_halves, "HALVES": num_halves, "STAGES": config.num_stages,
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
