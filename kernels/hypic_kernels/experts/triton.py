"""Kernels around the experts' products; a program per token, but for ranks and order."""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import torch
import triton.language as tl
from torch import Tensor

from hypic_kernels.launch import Launch, jit, jit_for_any

RANKS_AT_ONCE = 256
ORDERED_AT_ONCE = 32
COMPARED_AT_ONCE = 256
MOST_COMPARED = 8192


@jit
def _route(
    logits: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
) -> None:
    """The best is taken out ``TOP_K`` times; its weight comes from the softmax over all."""
    row = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    scores = tl.load(logits + row * E + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    powers = tl.exp(scores - tl.max(scores, axis=0))
    total = tl.sum(powers, axis=0)
    best = tl.zeros((SLOTS,), tl.float32)
    number = tl.zeros((SLOTS,), tl.int32)
    # Below every score, so that an expert taken out is not taken again and padding never is; NaN counts as lowest.
    left = tl.where(experts < E, tl.where(powers >= 0, powers, 0.0), -2.0)
    for slot in tl.static_range(TOP_K):
        taken = tl.argmax(left, axis=0)
        best = tl.where(slots == slot, tl.sum(tl.where(experts == taken, powers, 0.0), axis=0), best)
        number = tl.where(slots == slot, taken, number)
        left = tl.where(experts == taken, -1.0, left)
    divisor = tl.sum(best, axis=0) if RENORMALISE else total
    # total * 0 is NaN where any score is, or where all are -inf.
    best = best / divisor + total * 0.0
    places = row * TOP_K + slots
    tl.store(weights + places, best, mask=slots < TOP_K)
    tl.store(chosen + places, number, mask=slots < TOP_K)


@jit_for_any("NUM")
def _rank(chosen: tl.tensor, ranks: tl.tensor, counts: tl.tensor, NUM: tl.tensor, BLOCK: tl.constexpr) -> None:
    """How many rows of its expert came before each; the counts are left behind."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + here, mask=here < NUM, other=0)
    rank = tl.atomic_add(counts + expert, 1, mask=here < NUM, sem="relaxed")
    tl.store(ranks + here, rank, mask=here < NUM)


@jit
def _scatter(
    x: tl.tensor,
    chosen: tl.tensor,
    rows: tl.tensor,
    ranks: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    ends: tl.tensor,
    pitch: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A token's row is read once and written behind the rows of lower experts, at its rank among its own.

    Ranks and places are two tensors: one warp of a program may write while another still reads.
    """
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    count = tl.load(counts + experts, mask=experts < E, other=0)
    if token == 0:
        tl.store(ends + experts, tl.cumsum(count, axis=0), mask=experts < E)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(chosen + token * TOP_K + slot)
        before = tl.sum(tl.where(experts < expert, count, 0), axis=0)
        place = before + tl.load(ranks + token * TOP_K + slot)
        tl.store(places + token * TOP_K + slot, place)
        for start in tl.static_range(0, D, BLOCK_D):
            channels = start + tl.arange(0, BLOCK_D)
            found = tl.load(x + token * pitch + channels, mask=channels < D)
            tl.store(rows + place.to(tl.int64) * D + channels, found, mask=channels < D)


@jit_for_any("NUM")
def _order(
    chosen: tl.tensor,
    tokens: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    NUM: tl.tensor,
    E: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """A row's place is the number of rows before it, an expert's end that of rows of it and of lower experts.

    Both are counted over all rows: nothing is shared between programs, and rows of an expert keep their order.
    """
    blocks = (NUM + BLOCK - 1) // BLOCK
    is_rows = tl.program_id(0) < blocks
    here = tl.where(is_rows, tl.program_id(0), tl.program_id(0) - blocks) * BLOCK + tl.arange(0, BLOCK)
    # An expert ends before the first row of the next one.
    mine = tl.where(is_rows, tl.load(chosen + here, mask=is_rows & (here < NUM), other=0), here + 1)
    number = tl.where(is_rows, here, 0)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, NUM, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        other = tl.load(chosen + others, mask=others < NUM, other=2147483647)
        is_before = other[None, :] < mine[:, None]
        is_before |= (other[None, :] == mine[:, None]) & (others[None, :] < number[:, None])
        count += tl.sum(is_before.to(tl.int32), axis=1)
    if is_rows:
        tl.store(places + here, count, mask=here < NUM)
        tl.store(tokens + count, here // TOP_K, mask=here < NUM)
    else:
        tl.store(ends + here, count, mask=here < E)


@jit
def _combine(
    rows: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    shared_pitch: tl.tensor,
    x_pitch: tl.tensor,
    residual_pitch: tl.tensor,
    D: tl.constexpr,
    GATE_D: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if GATED:
        inner = tl.arange(0, BLOCK_G)
        asked = tl.load(x + token * x_pitch + inner, mask=inner < GATE_D, other=0.0).to(tl.float32)
        along = tl.load(gate + inner, mask=inner < GATE_D, other=0.0).to(tl.float32)
        factor = tl.sigmoid(tl.sum(asked * along, axis=0))
    for start in tl.static_range(0, D, BLOCK_D):
        channels = start + tl.arange(0, BLOCK_D)
        inside = channels < D
        total = tl.zeros((BLOCK_D,), tl.float32)
        for slot in tl.static_range(TOP_K):
            place = tl.load(places + token * TOP_K + slot).to(tl.int64)
            weight = tl.load(weights + token * TOP_K + slot).to(tl.float32)
            total += weight * tl.load(rows + place * D + channels, mask=inside, other=0.0).to(tl.float32)
        if SHARED:
            total += factor * tl.load(shared + token * shared_pitch + channels, mask=inside, other=0.0).to(tl.float32)
        if ADDS:
            # The sum is rounded before it is added, as in a model whose layers are apart.
            total = total.to(out.dtype.element_ty).to(tl.float32)
            total += tl.load(residual + token * residual_pitch + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * D + channels, total.to(out.dtype.element_ty), mask=inside)


def _padded(size: int) -> int:
    return max(2, 1 << (size - 1).bit_length())


def route(logits: Tensor, weights: Tensor, chosen: Tensor, renormalise: bool) -> Launch:
    num_experts, top_k = logits.shape[1], weights.shape[1]
    constants = {
        "E": num_experts, "TOP_K": top_k, "SLOTS": _padded(top_k), "BLOCK": _padded(num_experts),
        "RENORMALISE": renormalise,
    }  # fmt: skip
    return Launch(_route, (logits.shape[0],), (logits, weights, chosen), constants, 1)


def scatter(
    x: Tensor, chosen: Tensor, rows: Tensor, places: Tensor, counts: Tensor, ends: Tensor
) -> tuple[Launch, Launch]:
    """Two launches, one after the other; ``counts`` must be zero before the first."""
    num, width, num_experts = chosen.numel(), x.shape[1], ends.shape[0]
    ranks = torch.empty_like(places)
    ranking = Launch(_rank, (-(-num // RANKS_AT_ONCE),), (chosen, ranks, counts, num), {"BLOCK": RANKS_AT_ONCE}, 4)
    constants = {
        "D": width, "E": num_experts, "TOP_K": chosen.shape[1], "BLOCK_E": _padded(num_experts),
        "BLOCK_D": min(2048, _padded(width)),
    }  # fmt: skip
    copies = Launch(_scatter, (x.shape[0],), (x, chosen, rows, ranks, places, counts, ends, x.stride(0)), constants, 4)
    return ranking, copies


def order(chosen: Tensor, tokens: Tensor, places: Tensor, ends: Tensor) -> tuple[Launch, ...]:
    """One launch that compares every row with every other; where these are too many, numbers are scattered as rows."""
    num, num_experts = chosen.numel(), ends.shape[0]
    if num > MOST_COMPARED:
        numbers = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device)[:, None]
        return scatter(numbers, chosen, tokens, places, torch.zeros_like(ends), ends)
    grid = (-(-num // ORDERED_AT_ONCE) + -(-num_experts // ORDERED_AT_ONCE),)
    arguments = (chosen, tokens, places, ends, num, num_experts)
    constants = {"TOP_K": chosen.shape[1], "BLOCK": ORDERED_AT_ONCE, "AT_ONCE": COMPARED_AT_ONCE}
    return (Launch(_order, grid, arguments, constants, 4),)


def combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    x: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
) -> Launch:
    width, gate_width = rows.shape[1], 0 if gate is None else gate.shape[0]
    is_gated = gate is not None and x is not None
    arguments = (
        rows, places, weights, rows if shared is None else shared, rows if x is None else x,
        rows if gate is None else gate, rows if residual is None else residual, out,
        *(0 if each is None else each.stride(0) for each in (shared, x, residual)),
    )  # fmt: skip
    constants = {
        "D": width, "GATE_D": gate_width, "TOP_K": places.shape[1], "SHARED": shared is not None, "GATED": is_gated,
        "ADDS": residual is not None, "BLOCK_D": min(1024, _padded(width)), "BLOCK_G": _padded(max(gate_width, 2)),
    }  # fmt: skip
    return Launch(_combine, (places.shape[0],), arguments, constants, 4)
