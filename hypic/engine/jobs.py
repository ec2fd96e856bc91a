"""Entries in the making: segments that are being encoded, and entries on their way from a tier below.

Both have their pages and slots from the start and a list of the requests that wait for them; two requests that need
the same entry wait for one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hypic.engine.encode import Encode, Load
from hypic.engine.plan import Interior
from hypic.engine.pool import Pool
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment, Label
from hypic.engine.sizing import Need
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.expiry import Expiry
from hypic.engine.store.history import History
from hypic.engine.store.threads import Pending
from hypic.engine.store.tiered import Tiered


class Away(Protocol):
    """Other workers that may encode segments for this one."""

    def offer(self, jobs: Sequence[Encode]) -> None:
        """Encodes that were begun for a request: ``away`` is set for those that others do."""

    def withdraw(self, job: Encode) -> None:
        """Nobody needs an encode any more that is done elsewhere."""

    def keep(self, job: Encode) -> None:
        """An encode that is done elsewhere is asked for here by another worker: ``away`` is 0 if it is done here now,
        so that no two workers wait for each other."""

    def rebalance(self) -> None:
        """Between two steps: what was not begun may change hands, if plans were wrong."""


@dataclass
class Jobs:
    """See the module's docstring; keys of ``encoding`` and of ``loading`` never meet, nor with the store's."""

    pool: Pool
    store: DeviceStore
    tiers: Tiered
    history: History
    expiry: Expiry
    primers: Sequence[CachedSegment] = ()
    encoding: dict[bytes, Encode] = field(default_factory=dict)
    loading: dict[bytes, Load] = field(default_factory=dict)
    away: Away | None = None

    def find(self, key: bytes) -> Encode | Load | None:
        return self.encoding.get(key) or self.loading.get(key)

    def has(self, key: bytes) -> bool:
        """Whether the entry of ``key`` is not there yet, but will be."""
        return key in self.encoding or key in self.loading

    @property
    def is_waiting(self) -> bool:
        """Whether things change without a step here: entries come from a tier below or from other workers, which encode
        them, or go there, which gives back what they hold."""
        return bool(self.loading or self.store.num_lent) or any(job.away for job in self.encoding.values())

    def has_all_of(self, request: Request) -> bool:
        """Whether all entries that a running request needs are there."""
        held = request.held
        return held is not None and not held.wanted and not any(self.has(key) for key in held.entries)

    def num_left(self, is_asked: bool) -> int:
        """Tokens that are yet to be encoded here, for other workers or else for this one alone."""
        here = [job for job in self.encoding.values() if not job.away and job.is_asked is is_asked]
        return sum([job.num_left for job in here])

    def need(self, span: Interior, base: CachedSegment | None = None, is_load: bool = False) -> Need:
        """Pages and slots of a job."""
        num_new = span.stop - span.start - (base.num_cached if base is not None else 0)
        pages = self.pool.pages_for(num_new)
        return Need(pages, 1, 1) if is_load else Need(pages + self.pool.pages_for(span.seam), 2, 1)

    def load(self, request: Request, span: Interior, pages: list[int], pending: Pending) -> Load:
        """Begin to load, into ``pages``."""
        entry = self._entry(request, span, pages, self.pool.slots_of(pages, span.stop - span.start))
        pending.is_claimed = True
        job = self.loading[entry.key] = Load(entry, pending)
        return job

    def encode(self, request: Request, span: Interior, pages: list[int], base: CachedSegment | None) -> Encode:
        """Begin to encode; ``pages`` are those of the interior and behind them the seam's."""
        seam, pool = span.seam, self.pool
        num_new = span.stop - span.start - (base.num_cached if base is not None else 0)
        own = pool.pages_for(num_new)
        pages, seam_pages = pages[:own], pages[own:]
        interior = pool.slots_of(pages, num_new)
        if base is not None:
            self.store.pin(base)
            pool.share_pages(base.pages)
            pages, interior = [*base.pages, *pages], np.concatenate([base.kv_slots, interior])
        entry = self._entry(request, span, pages, interior)
        slots = np.concatenate([pool.slots_of(seam_pages, seam), interior])
        is_alone = request.plan.policy.deterministic
        job = Encode(entry, seam, slots, seam_pages, pool.take_state(), base, is_alone, self._primer(span))
        self.encoding[entry.key] = job
        return job

    def _primer(self, span: Interior) -> CachedSegment | None:
        if span.primer is None:
            return None
        found = next((kept for kept in self.primers if kept.ids == span.primer.ids), None)
        assert found is not None, "planned for another engine"
        return found

    def _entry(self, request: Request, span: Interior, pages: Sequence[int], slots: np.ndarray) -> CachedSegment:
        planned, pool = request.plan.segments[span.number], self.pool
        return CachedSegment(
            key=span.key,
            ids=request.plan.ids_of(span),
            kv_slots=slots,
            pages=tuple(pages),
            state_slot=pool.take_state(),
            transition_slot=pool.take_transition(),
            num_bytes=len(pages) * pool.page_bytes + pool.layout.state_bytes + pool.layout.transition_bytes,
            name=planned.segment.name,
            source=planned.segment.source,
            namespace=planned.segment.namespace,
            deterministic=request.plan.policy.deterministic,
            is_trial=request.is_trial,
            primer=span.behind,
        )

    def begin(self, jobs: Sequence[Encode]) -> None:
        """Where encodes start: at what their base holds, or at nothing: the first step of such a one reads no map."""
        self.pool.begin_maps([_map_slots_of(job.entry)[1] for job in jobs if job.base is None])
        for job in jobs:
            if job.base is not None:
                self.pool.copy_map(_map_slots_of(job.base), _map_slots_of(job.entry))

    def arrive(self) -> list[Request]:
        """Take in what has been loaded; returns the requests whose entry did not come, which must start again."""
        stranded: dict[str, Request] = {}
        for key, job in list(self.loading.items()):
            if not self.tiers.install(job.pending, job.entry):
                continue
            if job.pending.is_lost:
                stranded.update(job.waiters)
                for request in job.waiters.values():  # it was no hit after all
                    request.outcomes.pop(key, None)
                    request.tiers.pop(key, None)
                self._lose(job)
                continue
            del self.loading[key]
            self.expiry.watch(job.entry)
            self.store.put(job.entry, is_new=False)
            self.tiers.renamed(job.entry)
        return list(stranded.values())

    def stored(self, job: Encode) -> None:
        """A segment is encoded."""
        del self.encoding[job.entry.key]
        self._end(job)
        self.expiry.watch(job.entry)
        self.store.put(job.entry)
        self.tiers.made(job.entry)
        if not job.entry.is_forgotten and not job.entry.is_trial:
            entry = job.entry
            self.history.stored(Label(entry.name, entry.source, entry.namespace), entry.key, entry.primer)

    def came(self, arrived: Sequence[Encode]) -> None:
        """Segments' entries came from other workers, and are written."""
        for job in arrived:
            job.done, job.away = len(job.entry.ids), 0
            self.stored(job)

    def broken(self, job: Encode) -> None:
        """A segment's encode is not finite: nobody keeps it, and all that wait for it fail."""
        del self.encoding[job.entry.key]
        self._drop(job)

    def leave(self, request: Request) -> None:
        """A request waits no longer; what only it was waiting for is not made any more, and it holds that no longer."""
        for key, job in list(self.encoding.items()):
            if job.waiters.keys() == {request.id}:
                self._drop(self.encoding.pop(key))
            elif job.waiters.pop(request.id, None) and request.outcomes.get(key, ("hit",))[0] == "encoded":
                heir = next(iter(job.waiters.values()))  # from now on it is encoded on this one's behalf
                heir.outcomes[key] = request.outcomes[key]
        for load in list(self.loading.values()):
            if load.waiters.keys() == {request.id}:
                self._lose(load)
            else:
                load.waiters.pop(request.id, None)

    def _lose(self, job: Load) -> None:
        del self.loading[job.entry.key]
        _take_from(job)
        self.tiers.cancel(job.pending)
        job.entry.pins = 0
        self.store.release(job.entry)

    def _drop(self, job: Encode) -> None:
        """An encode that nobody waits for any more, or that failed."""
        if job.away and self.away is not None:
            self.away.withdraw(job)
        _take_from(job)
        job.entry.pins = 0
        self._end(job)
        self.store.release(job.entry)

    def _end(self, job: Encode) -> None:
        if job.base is not None:
            self.store.unpin(job.base)
        self.pool.drop_pages(job.seam_pages)
        self.pool.drop_state(job.state_slot)


def _take_from(job: Encode | Load) -> None:
    """Those who wait for an entry hold it no longer."""
    for request in job.waiters.values():
        if request.held is not None:
            request.held.entries.pop(job.entry.key, None)


def _map_slots_of(entry: CachedSegment) -> tuple[int, int]:
    assert entry.transition_slot is not None, "a snapshot has no map"
    return entry.state_slot, entry.transition_slot
