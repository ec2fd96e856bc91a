"""Sigmoid scores, chosen with a bias within the best groups, as a kernel: a program per token.

What it computes stands in ``reference.route_groups``; this file checks no argument: the package does.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.launch import Launch, jit


@jit
def _route_groups(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BIASED: tl.constexpr,
    RENORMALISE: tl.constexpr,
) -> None:
    """Experts lie as ``[group, place in it]``; where an expert cannot be taken (again) stands a large negative number,
    finite and of three kinds, so that every slot gets an expert of its own even in a row of NaN."""
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_S)[None, :]
    expert = group * SIZE + place
    real = (group < GROUPS) & (place < SIZE)
    logit = tl.load(logits + row * (SIZE * GROUPS) + expert, mask=real, other=0.0).to(tl.float32)
    scores = tl.sigmoid(logit)
    biased = scores
    if BIASED:
        biased += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    # NaN counts as lowest.
    left = tl.where(real, tl.where(biased >= -1e30, biased, -1e30), -4e30)
    if GROUPS > 1:
        first = tl.max(left, axis=1)
        where = tl.argmax(left, axis=1)
        both = first + tl.max(tl.where(place == where[:, None], -4e30, left), axis=1)
        numbers = tl.arange(0, BLOCK_G)
        # The row's group stands before the column's: it is better, or as good and of a lower number.
        is_before = (both[:, None] > both[None, :]) | ((both[:, None] == both[None, :]) & (group < numbers[None, :]))
        rank = tl.sum(is_before.to(tl.int32), axis=0)
        left = tl.where((rank < TOP_GROUPS)[:, None], left, -3e30)
    flat: tl.constexpr = BLOCK_G * BLOCK_S
    left, scores = tl.reshape(left, (flat,)), tl.reshape(scores, (flat,))
    expert = tl.reshape(expert, (flat,))
    positions, slots = tl.arange(0, flat), tl.arange(0, SLOTS)
    best, number = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.int32)
    for slot in tl.static_range(TOP_K):
        taken = positions == tl.argmax(left, axis=0)
        best = tl.where(slots == slot, tl.sum(tl.where(taken, scores, 0.0), axis=0), best)
        number = tl.where(slots == slot, tl.sum(tl.where(taken, expert, 0), axis=0), number)
        left = tl.where(taken, -2e30, left)
    # The sum times zero is NaN where any score is. Padding is told by ``left``, which needs a use beside the search: a
    # reshaped tensor that is only reduced once is permuted by Triton 3.6, and the place of the largest is then wrong.
    best += tl.sum(tl.where(left > -3.5e30, scores, 0.0), axis=0) * 0.0
    if RENORMALISE:
        best = best / (tl.sum(best, axis=0) + 1e-20)
    places = row * TOP_K + slots
    tl.store(weights + places, best * scale, mask=slots < TOP_K)
    tl.store(chosen + places, number, mask=slots < TOP_K)


def _padded(size: int) -> int:
    return max(2, 1 << (size - 1).bit_length())


def route_groups(
    logits: Tensor,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scale: float,
    renormalise: bool,
    weights: Tensor,
    chosen: Tensor,
) -> Launch:
    """The twin of ``reference.route_groups``; ``logits`` are contiguous."""
    top_k, size = chosen.shape[1], logits.shape[1] // num_groups
    constants = {
        "SIZE": size, "GROUPS": num_groups, "TOP_GROUPS": top_groups, "TOP_K": top_k, "SLOTS": _padded(top_k),
        "BLOCK_G": 1 if num_groups == 1 else _padded(num_groups), "BLOCK_S": _padded(size), "BIASED": bias is not None,
        "RENORMALISE": renormalise,
    }  # fmt: skip
    arguments = (logits, logits if bias is None else bias, weights, chosen, scale)
    return Launch(_route_groups, (len(logits),), arguments, constants, 1)
