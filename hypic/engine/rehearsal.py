"""Every kind of step once, before the engine is ready: kernels are compiled and checked here, on no request's path.

Long and short rows, an interior that is encoded and read in the same step, keys in pages, a chain that goes on. What is
computed is garbage in slots that nobody owns, and is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.pool import Pool
from hypic.engine.segment import Slots
from hypic.engine.sizing import Need

SEAM = 8
# Interiors of steps that are runs, of steps whose chunks are long, and of steps whose chunks are short.
LENGTHS = (1040, 600, 24)


def rehearse(run: Callable[[Sequence[Chain]], object], pool: Pool) -> None:
    """Run steps of every kind that the pool has room for; it must hold nothing yet."""
    for length in LENGTHS:
        pages = 2 * pool.pages_for(2 * SEAM + length)
        if 2 * (SEAM + length) < pool.max_context and not pool.lacks(Need(pages, 3, 1)):
            _rehearse(run, pool, length, pages)


def _rehearse(run: Callable[[Sequence[Chain]], object], pool: Pool, length: int, num_pages: int) -> None:
    pages, states, transition = (
        pool.take_pages(num_pages),
        [pool.take_state() for _ in range(3)],
        pool.take_transition(),
    )
    pool.clear_maps(*(torch.tensor([slot], device=pool.device) for slot in (states[0], transition)))
    slots = pool.slots_of(pages, 2 * (SEAM + length) + 1)
    encode = _encode(slots[: SEAM + length], states, transition)
    answer = _answer(slots[SEAM + length :], slots[SEAM : SEAM + length], states, transition)
    for chains in ([encode, answer], [encode], [answer]):
        run(chains)
    pool.drop_pages(pages)
    pool.drop_transition(transition)
    for state in states:
        pool.drop_state(state)


def _row(slots: Slots, position: int, fold: FoldInto | None = None) -> RowLink:
    return RowLink([0] * len(slots), position, slots, None, fold)


def _encode(slots: Slots, states: Sequence[int], transition: int) -> Chain:
    fold = FoldInto(states[0], transition, 0)
    return Chain([_row(slots[:SEAM], 0), _row(slots[SEAM:], SEAM, fold)], slots, 0, states[1])


def _answer(own: Slots, interior: Slots, states: Sequence[int], transition: int) -> Chain:
    """A seam, the interior and a tail as long as it; ``own`` are the slots of seam and tail."""
    length = len(interior)
    link = InteriorLink(states[0], transition, length, 0)
    tail = own[SEAM : SEAM + length]
    context = np.concatenate([own[:SEAM], interior, tail])
    links: list[RowLink | InteriorLink] = [_row(own[:SEAM], 0), link, _row(tail, SEAM + length)]
    return Chain(links, context, 0, states[2], wants_logits=True)
