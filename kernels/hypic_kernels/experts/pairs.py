"""Experts of few tokens as two launches that do little but read matrices: a program per token, expert and few columns.

The first multiplies with the chosen experts' first matrices and with the shared expert's, and may choose the experts
itself; the second multiplies back and adds everything up. Products are sums of single products, not of tiles: a tile
of one token would be 15 parts nothing. Nothing is shared between programs, and every sum has one order. What the two
compute together stands in ``reference.answer``.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.early import can_start_early, let_next_start, wait_for_last
from hypic_kernels.experts.layout import Few, Kind, Shared
from hypic_kernels.launch import Launch, jit


@jit
def _best(logits: tl.tensor, slot: tl.tensor, E: tl.constexpr, BLOCK_E: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The expert that stands in place ``slot`` by its score, and its part of the softmax.

    Powers and numbers are one key, so that each place costs one maximum: positive numbers are ordered as their bits
    are. NaN counts as lowest, and the lower number stands first in a tie.
    """
    experts = tl.arange(0, BLOCK_E)
    scores = tl.load(logits + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    powers = tl.exp(scores - tl.max(scores, axis=0))
    bits = tl.where(powers >= 0, powers, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(experts < E, bits * BLOCK_E + (BLOCK_E - 1 - experts), -1)
    best = tl.max(keys, axis=0)
    for _ in range(0, slot):
        keys = tl.where(keys == best, -1, keys)
        best = tl.max(keys, axis=0)
    part = tl.sum(tl.where(keys == best, powers, 0.0), axis=0) / tl.sum(powers, axis=0)
    return BLOCK_E - 1 - best % BLOCK_E, part


@jit
def _dots(
    given: tl.tensor,
    rows: tl.tensor,
    beside: tl.tensor,
    K: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sums over ``K`` of one row of numbers times ``BLOCK_N`` rows of a matrix, and ``TWO``: of another's."""
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    other = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        across = k + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            number = tl.load(given + across).to(tl.float32)
            total += tl.load(rows + across).to(tl.float32) * number
            if TWO:
                other += tl.load(beside + across).to(tl.float32) * number
        else:
            number = tl.load(given + across, mask=across < K, other=0.0).to(tl.float32)
            total += tl.load(rows + across, mask=across < K, other=0.0).to(tl.float32) * number
            if TWO:
                other += tl.load(beside + across, mask=across < K, other=0.0).to(tl.float32) * number
    return tl.sum(total, axis=1), tl.sum(other, axis=1)


@jit
def _activated(total: tl.tensor, up: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    if KIND == "silu":
        return total * tl.sigmoid(total) * up
    # Not a maximum: NaN stays NaN.
    total = tl.where(total < 0, 0.0, total)
    return total * total


@jit
def _into(
    x: tl.tensor,
    logits: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    weight: tl.tensor,
    shared_gate: tl.tensor,
    shared_up: tl.tensor,
    gate: tl.tensor,
    factors: tl.tensor,
    hidden: tl.tensor,
    x_pitch: tl.tensor,
    logits_pitch: tl.tensor,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    ROUTES: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """``hidden [N, TOP_K INNER + SHARED]``: a token's experts by slot, then the shared one, whose factor goes to
    ``factors [N]``. If this ``ROUTES``, ``chosen`` and ``weights`` are written: experts, and parts of the softmax."""
    if EARLY:
        let_next_start()
        wait_for_last()
    token = tl.program_id(1).to(tl.int64)
    per_slot: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    slot = tl.program_id(0) // per_slot
    given, target = x + token * x_pitch, hidden + token * (TOP_K * INNER + SHARED)
    if slot < TOP_K:
        block = tl.program_id(0) - slot * per_slot
        if ROUTES:
            expert, part = _best(logits + token * logits_pitch, slot, E, BLOCK_E)
            if block == 0:
                tl.store(chosen + token * TOP_K + slot, expert.to(tl.int32))
                tl.store(weights + token * TOP_K + slot, part)
        else:
            expert = tl.load(chosen + token * TOP_K + slot).to(tl.int64)
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        # Columns that there are not read the first, and are not written.
        row = tl.where(columns < INNER, columns, 0)[:, None] * K
        first = weight + expert * ((2 if KIND == "silu" else 1) * INNER * K)
        total, up = _dots(given, first + row, first + INNER * K + row, K, KIND == "silu", BLOCK_N, BLOCK_K, STAGES)
        value = _activated(total, up, KIND).to(hidden.dtype.element_ty)
        tl.store(target + slot * INNER + columns, value, mask=columns < INNER)
    else:
        if SHARED > 0:
            block = tl.program_id(0) - TOP_K * per_slot
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            row = tl.where(columns < SHARED, columns, 0)[:, None] * K
            total, up = _dots(given, shared_gate + row, shared_up + row, K, KIND == "silu", BLOCK_N, BLOCK_K, STAGES)
            value = _activated(total, up, KIND).to(hidden.dtype.element_ty)
            tl.store(target + TOP_K * INNER + columns, value, mask=columns < SHARED)
            if block == 0:
                factor = 1.0
                if GATED:
                    inner = tl.arange(0, BLOCK_G)
                    asked = tl.load(given + inner, mask=inner < K, other=0.0).to(tl.float32)
                    along = tl.load(gate + inner, mask=inner < K, other=0.0).to(tl.float32)
                    factor = tl.sigmoid(tl.sum(asked * along, axis=0))
                tl.store(factors + token, factor)


@jit
def _back(
    hidden: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    factors: tl.tensor,
    weight: tl.tensor,
    shared_down: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    residual_pitch: tl.tensor,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ADDS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Sums of all experts' products, ``GROUP`` slots at once, so that as many matrices are on their way."""
    if EARLY:
        let_next_start()
        wait_for_last()
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.where(columns < D, columns, 0)
    given = hidden + token * (TOP_K * INNER + SHARED)
    total = tl.zeros((GROUP, BLOCK_N, BLOCK_K), tl.float32)
    # Numbers are read as matrices lie: nothing is moved between threads.
    everywhere = tl.zeros((1, BLOCK_N, 1), tl.int32)
    for first in tl.static_range(0, TOP_K, GROUP):
        slots = first + tl.arange(0, GROUP)
        expert = tl.load(chosen + token * TOP_K + slots, mask=slots < TOP_K, other=0).to(tl.int64)
        factor = tl.load(weights + token * TOP_K + slots, mask=slots < TOP_K, other=0.0).to(tl.float32)
        matrix = weight + (expert * (D * INNER))[:, None, None] + (column * INNER)[None, :, None]
        row = given + (slots * INNER)[:, None, None] + everywhere
        for k in tl.static_range(0, INNER, BLOCK_K):
            across = k + tl.arange(0, BLOCK_K)[None, None, :]
            if INNER % BLOCK_K == 0 and TOP_K % GROUP == 0:
                number = tl.load(row + across).to(tl.float32)
                found = tl.load(matrix + across).to(tl.float32)
            else:
                inside = (slots < TOP_K)[:, None, None] & (across < INNER)
                number = tl.load(row + across, mask=inside, other=0.0).to(tl.float32)
                found = tl.load(matrix + across, mask=inside, other=0.0).to(tl.float32)
            total += found * (number * factor[:, None, None])
    whole = tl.zeros((BLOCK_N, BLOCK_S), tl.float32)
    share = 0.0
    if SHARED > 0:
        share = tl.load(factors + token)
        for k in tl.static_range(0, SHARED, BLOCK_S):
            across = k + tl.arange(0, BLOCK_S)[None, :]
            number = tl.load(given + TOP_K * INNER + across, mask=across < SHARED, other=0.0).to(tl.float32)
            found = tl.load(shared_down + (column * SHARED)[:, None] + across, mask=across < SHARED, other=0.0)
            whole += found.to(tl.float32) * number
    answer = tl.sum(tl.sum(total, axis=2), axis=0)
    if RENORMALISE:
        all_slots = tl.arange(0, SLOTS)
        parts = tl.load(weights + token * TOP_K + all_slots, mask=all_slots < TOP_K, other=0.0)
        answer = answer / tl.sum(parts.to(tl.float32), axis=0)
    if SHARED > 0:
        answer += share * tl.sum(whole, axis=1)
    if ADDS:
        # The sum is rounded before it is added, as in a model whose layers are apart.
        answer = answer.to(out.dtype.element_ty).to(tl.float32)
        answer += tl.load(residual + token * residual_pitch + column).to(tl.float32)
    tl.store(out + token * D + columns, answer.to(out.dtype.element_ty), mask=columns < D)


def into(
    x: Tensor,
    logits: Tensor | None,
    weights: Tensor,
    chosen: Tensor,
    weight: Tensor,
    shared: Shared | None,
    kind: Kind,
    factors: Tensor,
    hidden: Tensor,
    config: Few,
) -> Launch:
    """Fills ``hidden`` and ``factors``, and with ``logits`` also ``weights`` and ``chosen``; see ``_into``."""
    top_k, width = chosen.shape[1], x.shape[1]
    inner = weight.shape[1] // (2 if kind == "silu" else 1)
    shared_inner = 0 if shared is None else len(shared.up)
    first, up, gate = (x, x, None) if shared is None else (shared.first, shared.up, shared.gate)
    arguments = (
        x, x if logits is None else logits, weights, chosen, weight, first if kind == "silu" else up, up,
        x if gate is None else gate, factors, hidden, x.stride(0), 0 if logits is None else logits.stride(0),
    )  # fmt: skip
    num_experts = 1 if logits is None else logits.shape[1]
    constants = {
        "E": num_experts, "TOP_K": top_k, "K": width, "INNER": inner, "SHARED": shared_inner,
        "ROUTES": logits is not None, "GATED": gate is not None, "KIND": kind, "BLOCK_E": _padded(num_experts),
        "BLOCK_G": _padded(width), "BLOCK_N": config.block_n, "BLOCK_K": min(config.block_k, _padded(width)),
        "STAGES": config.num_stages, "EARLY": config.early and can_start_early(x.device),
    }  # fmt: skip
    blocks = top_k * -(-inner // config.block_n) + -(-shared_inner // config.block_n)
    return Launch(_into, (blocks, len(x)), arguments, constants, config.num_warps)


def back(
    hidden: Tensor,
    weights: Tensor,
    chosen: Tensor,
    weight: Tensor,
    shared: Shared | None,
    factors: Tensor,
    renormalise: bool,
    residual: Tensor | None,
    out: Tensor,
    config: Few,
) -> Launch:
    """Fills ``out [N, D]``; see ``_back``."""
    top_k, (_, width, inner) = chosen.shape[1], weight.shape
    shared_inner = 0 if shared is None else shared.down.shape[1]
    arguments = (
        hidden, weights, chosen, factors, weight, weight if shared is None else shared.down,
        hidden if residual is None else residual, out, 0 if residual is None else residual.stride(0),
    )  # fmt: skip
    constants = {
        "D": width, "TOP_K": top_k, "INNER": inner, "SHARED": shared_inner, "RENORMALISE": renormalise,
        "ADDS": residual is not None, "SLOTS": _padded(top_k), "BLOCK_N": config.block_n,
        "BLOCK_K": min(config.block_k, _padded(inner)), "BLOCK_S": min(config.block_k, _padded(max(2, shared_inner))),
        "GROUP": min(config.group, _padded(top_k)), "EARLY": config.early and can_start_early(out.device),
    }  # fmt: skip
    return Launch(_back, (-(-width // config.block_n), len(out)), arguments, constants, config.num_warps)


def _padded(size: int) -> int:
    return max(2, 1 << (size - 1).bit_length())
