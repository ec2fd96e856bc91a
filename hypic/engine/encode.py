"""A segment being encoded or loaded, as the scheduler sees it: a cursor, what it holds, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hypic.engine.batch import Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.chain import ZERO_SLOT
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment, Slots
from hypic.engine.store.threads import Pending


@dataclass(eq=False)
class Load:
    """An entry on its way from a tier below: its pages and slots are there, and ``pending`` is what comes."""

    entry: CachedSegment
    pending: Pending
    waiters: dict[str, Request] = field(default_factory=dict)


@dataclass(eq=False)
class Encode:
    """A segment being encoded alone: position 0, nothing before it, no other text in view; or right behind ``primer``,
    a snapshot that every segment is encoded behind, at the positions that follow it.

    ``slots`` are the token slots of the whole segment: the seam's are given back at the end, the interior's become the
    entry's. ``waiters`` are the requests that need it. ``base`` is an entry of a text that this one begins with: its
    interior is a link of the chain, and the new entry starts as its copy, so only the seam and what is new is run.
    ``away`` names the request for it to another worker, which is awaited instead of running anything; 0: none is.
    """

    entry: CachedSegment
    seam: int
    slots: Slots
    seam_pages: list[int]
    state_slot: int
    base: CachedSegment | None = None
    is_alone: bool = False
    primer: CachedSegment | None = None
    waiters: dict[str, Request] = field(default_factory=dict)
    done: int = 0
    away: int = 0

    @property
    def num_left(self) -> int:
        return len(self.entry.ids) - self.done

    @property
    def is_asked(self) -> bool:
        """Whether another worker waits for it too: then it is made here, and nobody else is asked for it."""
        return any(request.stays for request in self.waiters.values())

    def chain(self, budget: int) -> tuple[Chain, int]:
        """Rows of at most ``budget`` tokens from ``done`` on, and the position they reach."""
        links: list[RowLink | InteriorLink] = []
        position, known = self.done, self.seam if self.base is None else len(self.base.ids)
        if position < self.seam:
            stop = min(self.seam, position + budget)
            links.append(self._row(position, stop, None))
            budget, position = budget - (stop - position), stop
        if position >= self.seam and budget > 0:
            transition = self.entry.transition_slot
            assert transition is not None, "a snapshot is never encoded"
            if position < known:
                links.append(self._known())
            start = max(position, known)
            position = min(len(self.entry.ids), start + budget)
            links.append(self._row(start, position, FoldInto(self.entry.state_slot, transition, start - self.seam)))
        return Chain(links, self._context(position), self._initial_slot, self.state_slot), position

    def _context(self, position: int) -> Slots:
        own = self.slots[:position]
        return own if self.primer is None else np.concatenate([self.primer.kv_slots, own])

    @property
    def _initial_slot(self) -> int:
        if self.done:
            return self.state_slot
        return ZERO_SLOT if self.primer is None else self.primer.state_slot

    @property
    def _num_before(self) -> int:
        return 0 if self.primer is None else self.primer.num_cached

    def _known(self) -> InteriorLink:
        base = self.base
        assert base is not None and base.transition_slot is not None, "only entries are continued"
        return InteriorLink(base.state_slot, base.transition_slot, base.num_cached, 0)

    def _row(self, start: int, stop: int, fold: FoldInto | None) -> RowLink:
        place = self._num_before + start
        return RowLink(self.entry.ids[start:stop], place, self.slots[start:stop], None, fold)
