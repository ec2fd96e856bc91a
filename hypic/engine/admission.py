"""Admission: what a request needs of the pool, taken whole or not at all.

Hits are pinned first, then room is made for the rest: pages for every row of the prompt, a state slot, and pages and
slots for each segment that is neither cached nor being encoded already.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hypic.engine.plan import Interior, Mark, Row
from hypic.engine.pool import Need, Pool
from hypic.engine.request import Encode, Held, Request
from hypic.engine.segment import CachedSegment
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.history import History
from hypic.engine.store.image import EntryImage, install
from hypic.errors import PromptTooLong, StoreFull
from hypic.types import Outcome


class Away(Protocol):
    """Other workers that may encode segments for this one."""

    def offer(self, request: Request, jobs: Sequence[Encode]) -> None:
        """Encodes that were begun for a request: ``away`` is set for those that others do."""

    def withdraw(self, job: Encode) -> None:
        """Nobody needs an encode any more that is done elsewhere."""


@dataclass(frozen=True)
class _Found:
    """What the caches hold of a request: a head, and entries by key (``None``: to be encoded or being encoded)."""

    snapshot: CachedSegment | None
    wanted: dict[bytes, Interior]
    entries: dict[bytes, CachedSegment | None]

    @property
    def start(self) -> int:
        return self.snapshot.num_cached if self.snapshot is not None else 0

    @property
    def hits(self) -> list[CachedSegment]:
        return [entry for entry in (self.snapshot, *self.entries.values()) if entry is not None]


@dataclass
class Admission:
    """Takes memory for requests; ``encoding`` is the table of segments being encoded, by key."""

    pool: Pool
    store: DeviceStore
    max_context: int
    history: History = field(default_factory=History)
    encoding: dict[bytes, Encode] = field(default_factory=dict)
    away: Away | None = None

    def check(self, request: Request) -> None:
        """Whether a request could ever run.

        Raises:
            PromptTooLong: the prompt does not fit the context.
            StoreFull: it needs more than the whole memory.
        """
        num = len(request.prompt.ids)
        if num >= self.max_context:
            raise PromptTooLong(
                f"the prompt has {num} tokens and the context holds {self.max_context}; leave room for the answer: "
                "shorten it or pass fewer segments."
            )
        need = self._need(request, 0, request.keys(0), {})
        if not self.pool.could_hold(need):
            capacity = self.pool.capacity
            raise StoreFull(
                f"the prompt needs {need.pages} pages, {need.states} state slots and {need.transitions} transition "
                f"slots, and memory holds {capacity.pages}, {capacity.states} and {capacity.transitions}; raise "
                "memory= or pass fewer segments."
            )

    def place(self, request: Request) -> bool:
        """Pin what is cached and take memory for the rest; whether there was enough. All or nothing."""
        found = self._find(request)
        for entry in found.hits:
            self.store.pin(entry)
        missing = {k: s for k, s in found.wanted.items() if found.entries[k] is None and k not in self.encoding}
        bases = self._bases(request, missing)
        for base in bases.values():
            self.store.pin(base)
        if not self.store.make_room(self._need(request, found.start, missing, bases)):
            for entry in (*found.hits, *bases.values()):
                self.store.unpin(entry)
            return False
        self.store.count(len(found.hits), len(missing))
        self._hold(request, found)
        jobs = self._begin_all(request, missing, bases)
        self._collect(request, found, missing)
        self._map_slots(request, found.start)
        if self.away is not None and jobs and not request.stays:
            self.away.offer(request, jobs)
        return True

    def release(self, request: Request) -> None:
        """Give back what a request holds; segments that only it was waiting for are no longer encoded."""
        held, request.held = request.held, None
        if held is None:
            return
        for entry in held.entries.values():
            self.store.unpin(entry)
        if held.snapshot is not None:
            self.store.unpin(held.snapshot)
        self.pool.drop_pages(held.pages)
        if held.state_slot:
            self.pool.drop_state(held.state_slot)
        for key, job in list(self.encoding.items()):
            if job.waiters.pop(request.id, None) is None:
                continue
            if not job.waiters:
                self._drop(self.encoding.pop(key))
            elif key in request.outcomes and request.outcomes[key][0] == "encoded":
                heir = next(iter(job.waiters.values()))  # from now on it is encoded on this one's behalf
                heir.outcomes[key] = request.outcomes[key]

    def stored(self, job: Encode) -> None:
        """A segment is encoded."""
        del self.encoding[job.entry.key]
        self._end(job)
        self.store.put(job.entry)
        self.history.stored(job.entry.name, job.entry.source, job.entry.key)

    def arrived(self, job: Encode, image: EntryImage) -> None:
        """A segment's entry came from another worker; the image was checked."""
        install(self.pool, image, job.entry)
        job.done, job.away = len(job.entry.ids), 0
        self.stored(job)

    def waits_for_others(self, request: Request) -> bool:
        """Whether a segment that the request needs is being encoded elsewhere."""
        return any(job.away and request.id in job.waiters for job in self.encoding.values())

    def broken(self, job: Encode) -> None:
        """A segment's encode is not finite: nobody keeps it, and all that wait for it fail."""
        del self.encoding[job.entry.key]
        for request in job.waiters.values():
            if request.held is not None:
                request.held.entries.pop(job.entry.key, None)
        self._drop(job)

    def snapshot(self, request: Request, digest: bytes, length: int, state_slot: int) -> CachedSegment:
        """A snapshot of the request's first ``length`` positions; it shares their pages and owns ``state_slot``."""
        held = request.held
        assert held is not None, "a snapshot is taken of what a request holds"
        slots = held.slots[:length].copy()
        pages = np.unique(slots // self.pool.page_size).tolist()
        self.pool.share_pages(pages)
        num_bytes = self.pool.layout.state_bytes + len(set(pages) & set(held.pages)) * self.pool.page_bytes
        return CachedSegment(digest, request.head(length), slots, tuple(pages), state_slot, None, num_bytes)

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _need(
        self, request: Request, start: int, missing: dict[bytes, Interior], bases: dict[bytes, CachedSegment]
    ) -> Need:
        need = Need(pages=self.pool.pages_for(request.rows_from(start) + 1), states=1)
        seam_pages = self.pool.pages_for(request.plan.policy.seam)
        for key, span in missing.items():
            num_new = span.stop - span.start - (bases[key].num_cached if key in bases else 0)
            need += Need(self.pool.pages_for(num_new) + seam_pages, 2, 1)
        return need

    def _bases(self, request: Request, missing: dict[bytes, Interior]) -> dict[bytes, CachedSegment]:
        """Entries that missing ones continue: what was encoded last under the same name, if the text only grew.

        A deterministic request starts from nothing, so that its bits do not depend on what is cached.
        """
        if request.plan.policy.deterministic:
            return {}
        bases = {key: self._base(request, span) for key, span in missing.items()}
        return {key: base for key, base in bases.items() if base is not None}

    def _base(self, request: Request, span: Interior) -> CachedSegment | None:
        planned, seam = request.plan.segments[span.number], request.plan.policy.seam
        key = self.history.previous(planned.segment)
        base = None if key is None else self.store.find(key)
        if base is None or base.is_snapshot or base.namespace != planned.segment.namespace:
            return None
        is_grown = len(base.ids) < len(planned.ids) and planned.ids[: len(base.ids)] == base.ids
        # Every step of growth leaves a page partly filled: entries of twice the pages they need are made anew.
        is_dense = len(base.pages) <= 2 * self.pool.pages_for(base.num_cached)
        return base if is_grown and is_dense and len(base.ids) - base.num_cached == seam else None

    def _find(self, request: Request) -> _Found:
        snapshot = next((entry for mark in reversed(request.plan.marks) if (entry := self._at(request, mark))), None)
        wanted = request.keys(snapshot.num_cached if snapshot is not None else 0)
        segments = request.plan.segments
        entries = {
            key: None if key in self.encoding else self.store.get(key, segments[span.number].ids)
            for key, span in wanted.items()
        }
        return _Found(snapshot, wanted, entries)

    def _at(self, request: Request, mark: Mark) -> CachedSegment | None:
        if mark.digest not in self.store:
            return None
        return self.store.get(mark.digest, request.plan.ids[: mark.position])

    def _hold(self, request: Request, found: _Found) -> None:
        pages = self.pool.take_pages(self.pool.pages_for(request.rows_from(found.start) + 1))
        slots = np.zeros(max(request.longest, request.num_planned) + 1, dtype=np.int64)
        request.held = Held(slots, self.pool.take_state(), pages, {}, found.snapshot)
        request.done = request.last_mark = found.start
        request.placed_s = request.placed_s if request.placed_s is not None else time.perf_counter()
        request.initial_slot = found.snapshot.state_slot if found.snapshot is not None else 0

    def _collect(self, request: Request, found: _Found, missing: dict[bytes, Interior]) -> None:
        held = request.held
        assert held is not None, "collected for a request that holds nothing"
        for key in found.wanted:
            entry = found.entries[key]
            if entry is None:
                job = self.encoding[key]
                job.waiters[request.id] = request
                entry = job.entry
                self.store.pin(entry)
            outcome: tuple[Outcome, str] = ("hit", "")
            if key in missing:
                outcome = ("encoded", self._reason(request, missing[key], self.encoding[key].base))
            request.outcomes.setdefault(key, outcome)
            held.entries[key] = entry

    def _reason(self, request: Request, span: Interior, base: CachedSegment | None) -> str:
        planned, seam = request.plan.segments[span.number], request.plan.policy.seam
        assert planned.key is not None, "only cached segments are encoded"
        reason = self.history.reason(planned.segment, planned.ids, planned.key, seam)
        self.history.note(planned.segment, planned.ids, planned.key, seam)
        if base is None:
            return reason
        request.continued[planned.key] = base.num_cached
        return f"grown: {len(planned.ids) - len(base.ids)} new tokens behind {len(base.ids)} known ones"

    def _begin_all(
        self, request: Request, missing: dict[bytes, Interior], bases: dict[bytes, CachedSegment]
    ) -> list[Encode]:
        if not missing:
            return []
        jobs = [self._begin(request, span, bases.get(key)) for key, span in missing.items()]
        self.encoding.update({job.entry.key: job for job in jobs})
        device, fresh = self.pool.device, [job.entry for job in jobs if job.base is None]
        states = torch.tensor([entry.state_slot for entry in fresh], dtype=torch.long, device=device)
        transitions = torch.tensor([entry.transition_slot for entry in fresh], dtype=torch.long, device=device)
        self.pool.clear_maps(states, transitions)
        for job in jobs:
            if job.base is not None:
                self.pool.copy_map(_map_slots_of(job.base), _map_slots_of(job.entry))
        return jobs

    def _begin(self, request: Request, span: Interior, base: CachedSegment | None) -> Encode:
        planned, seam, pool = request.plan.segments[span.number], request.plan.policy.seam, self.pool
        assert planned.key is not None, "only cached segments are encoded"
        num_new = span.stop - span.start - (base.num_cached if base is not None else 0)
        pages, seam_pages = pool.take_pages(pool.pages_for(num_new)), pool.take_pages(pool.pages_for(seam))
        interior = pool.slots_of(pages, num_new)
        if base is not None:
            pool.share_pages(base.pages)
            pages, interior = [*base.pages, *pages], np.concatenate([base.kv_slots, interior])
        entry = CachedSegment(
            key=planned.key,
            ids=planned.ids,
            kv_slots=interior,
            pages=tuple(pages),
            state_slot=pool.take_state(),
            transition_slot=pool.take_transition(),
            num_bytes=len(pages) * pool.page_bytes + pool.layout.state_bytes + pool.layout.transition_bytes,
            name=planned.segment.name,
            source=planned.segment.source,
            namespace=planned.segment.namespace,
            deterministic=request.plan.policy.deterministic,
        )
        slots = np.concatenate([pool.slots_of(seam_pages, seam), interior])
        return Encode(entry, seam, slots, seam_pages, pool.take_state(), base, request.plan.policy.deterministic)

    def _map_slots(self, request: Request, start: int) -> None:
        """Token slots by position: the snapshot's, the request's own for rows, the entries' for interiors."""
        held = request.held
        assert held is not None, "mapped for a request that holds nothing"
        if held.snapshot is not None:
            held.slots[:start] = held.snapshot.kv_slots
        own = self.pool.slots_of(held.pages, len(held.pages) * self.pool.page_size)
        for span in request.plan.spans:
            if isinstance(span, Row):
                first = max(span.start, start)
                count = max(0, span.stop - first)
                held.slots[first : first + count] = own[held.num_own : held.num_own + count]
                held.num_own += count
            elif span.start >= start:
                held.slots[span.start : span.stop] = request.entry(span).kv_slots

    def _drop(self, job: Encode) -> None:
        """An encode that nobody waits for any more, or that failed."""
        if job.away and self.away is not None:
            self.away.withdraw(job)
        job.entry.pins = 0
        self._end(job)
        self.store.release(job.entry)

    def _end(self, job: Encode) -> None:
        if job.base is not None:
            self.store.unpin(job.base)
        self.pool.drop_pages(job.seam_pages)
        self.pool.drop_state(job.state_slot)


def _map_slots_of(entry: CachedSegment) -> tuple[int, int]:
    assert entry.transition_slot is not None, "a snapshot has no map"
    return entry.state_slot, entry.transition_slot
