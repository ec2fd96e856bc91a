"""Admission: what a request needs of the pool.

A request is admitted whole if memory can hold all of it at once: hits are pinned first, then room is made for the rest.
A larger one is admitted *in pieces*: pages for all its tokens and one state slot are its own from the start, and its
interiors are asked for in prompt order as far as slots go. Either way an interior's slots are given back as soon as the
request's state has taken it in, and only its pages are kept, so requests that each hold a part do not wait for each
other: what is held is folded next, and the state slots that running requests leave over are enough for one encode.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from hypic.engine.encode import Encode, Load
from hypic.engine.jobs import Jobs
from hypic.engine.lookup import ONE_ENCODE, Found, Lookup
from hypic.engine.plan import Interior, PlannedSegment
from hypic.engine.pool import Pool
from hypic.engine.request import Held, Request
from hypic.engine.segment import CachedSegment
from hypic.engine.sizing import Need
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.expiry import Expiry
from hypic.engine.store.history import History
from hypic.engine.store.tiered import Choice, Tiered


@dataclass
class Admission:
    """Takes memory for requests; ``jobs`` make the entries that are not there, behind ``primers`` if there are any."""

    pool: Pool
    store: DeviceStore
    tiers: Tiered
    max_context: int
    history: History = field(default_factory=History)
    expiry: Expiry = field(default_factory=Expiry)
    primers: Sequence[CachedSegment] = ()

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.pool, self.store, self.tiers, self.history, self.expiry, self.primers)
        self.lookup = Lookup(self.pool, self.store, self.tiers, self.jobs, self.history)

    @property
    def encoding(self) -> dict[bytes, Encode]:
        """Segments that are being encoded, by key."""
        return self.jobs.encoding

    @property
    def most_running(self) -> int:
        """Requests whose states leave enough slots for one encode."""
        return max(1, self.pool.capacity.states - ONE_ENCODE.states)

    def place(self, request: Request) -> bool:
        """Take memory for a request, all that it needs or, if that is more than there can be, for a beginning."""
        found = self.lookup.find(request)
        for entry in found.pinned:
            self.store.pin(entry)
        is_whole = self._place_whole(request, found)
        for entry in found.pinned:
            if not is_whole or entry is not found.snapshot:
                self.store.unpin(entry, is_use=False)
        return is_whole or (
            not self.pool.could_hold(self.lookup.whole(request)) and self._place_in_pieces(request, found)
        )

    def advance(self, request: Request) -> None:
        """Ask for the next interiors of a request that was admitted in pieces, as far as there are slots."""
        held = request.held
        assert held is not None, "only running requests hold anything"
        if held.wanted and not (request.plan.policy.deterministic and held.entries):
            self._ask(request, {}, {})

    def settle(self, request: Request) -> None:
        """The running state has taken in all before ``done``: of these interiors only the pages are still needed."""
        held = request.held
        assert held is not None, "only running requests hold anything"
        head = held.snapshot
        gone = {key: entry for key, entry in held.entries.items() if held.last[key] <= request.done}
        if head is not None and request.done > head.num_cached:
            held.snapshot, gone[head.key] = None, head
        for key, entry in gone.items():
            held.entries.pop(key, None)
            self.pool.share_pages(entry.page_numbers)
            held.folded.append(entry)
            self.store.unpin(entry)

    def release(self, request: Request) -> None:
        """Give back what a request holds; what only it was waiting for is no longer made."""
        self.jobs.leave(request)
        held, request.held = request.held, None
        if held is None:
            return
        for entry in held.entries.values():
            self.store.unpin(entry)
        if held.snapshot is not None:
            self.store.unpin(held.snapshot)
        self.pool.drop_pages(held.pages)
        self.pool.drop_pages(held.spare)
        for entry in held.folded:
            self.pool.drop_pages(entry.page_numbers)
        if held.table_row is not None:
            self.pool.table.drop(held.table_row)
        if held.state_slot:
            self.pool.drop_state(held.state_slot)
        if held.other_slot:
            self.pool.ahead.append(held.other_slot)

    def waits_for_others(self, request: Request) -> bool:
        """Whether a segment that the request needs is being encoded by another worker."""
        return any(job.away and request.id in job.waiters for job in self.encoding.values())

    def snapshot(self, request: Request, digest: bytes, length: int, state_slot: int) -> CachedSegment:
        """A snapshot of the request's first ``length`` positions; it shares their pages and owns ``state_slot``."""
        held = request.held
        assert held is not None, "a snapshot is taken of what a request holds"
        slots = held.slots[:length].copy()
        pages = self.pool.pages_of(slots)
        self.pool.share_pages(pages)
        own = len(set(held.pages).intersection(pages))
        num_bytes = self.pool.layout.state_bytes + own * self.pool.page_bytes
        taken = CachedSegment(digest, request.head(length), slots, tuple(pages), state_slot, None, num_bytes)
        taken.num_own, taken.is_forgotten = own * self.pool.page_size, request.is_forgotten
        within = [planned for planned in request.prompt.segments if planned.origin < length]
        keys = {key for planned in within for key in planned.keys}
        inside = [entry for entry in held.parts if entry.is_snapshot or entry.key in keys]
        self.expiry.label_snapshot(taken, request.prompt.labels(length), [p.segment for p in within], inside)
        return taken

    # -- taking it ---------------------------------------------------------------------------------------------------

    def _place_whole(self, request: Request, found: Found) -> bool:
        need = self.lookup.own(request, found.start)
        for key, choice in found.choices.items():
            need += self.jobs.need(found.wanted[key], found.bases.get(key), choice.pending is not None)
        # A deterministic request takes the same steps whatever is cached, so all of it must fit, cached or not.
        fits = not request.plan.policy.deterministic or self.pool.could_hold(self.lookup.whole(request))
        if not fits or not self.store.make_room(need):
            return False
        self._hold(request, found, need.pages, in_pieces=False)
        self._ask(request, found.choices, found.bases, found.entries)
        return True

    def _place_in_pieces(self, request: Request, found: Found) -> bool:
        """Hits and what they hold are asked for when their turn comes."""
        need = self.lookup.in_pieces(request, found.start)
        if found.snapshot is not None:
            self.store.pin(found.snapshot)
        if self.store.make_room(need):
            self._hold(request, found, need.pages, in_pieces=True)
            self._ask(request, {}, {})
            return True
        if found.snapshot is not None:
            self.store.unpin(found.snapshot, is_use=False)
        return False

    def _hold(self, request: Request, found: Found, num_pages: int, in_pieces: bool) -> None:
        start, pool = found.start, self.pool
        pages = pool.take_pages(num_pages)
        own = pool.pages_for(request.rows_from(start) + 1)
        slots = np.zeros(max(request.longest, request.num_planned) + 1, dtype=np.int64)
        wanted = deque(request.interiors(start))
        state, row = (0, None) if request.only_warms else (pool.take_state(), pool.table.take())
        request.held = Held(slots, state, pages[:own], found.snapshot, wanted, pages[own:], row, in_pieces)
        request.done = request.last_mark = start
        request.placed_s = request.placed_s if request.placed_s is not None else time.perf_counter()
        request.initial_slot = found.snapshot.state_slot if found.snapshot is not None else 0
        self._map_rows(request, start)
        self._label_head(request, found)

    def _label_head(self, request: Request, found: Found) -> None:
        """A snapshot, and the segments that it holds, are known by the names that this request calls them."""
        if found.snapshot is None:
            return
        self.store.count(1, 0)
        found.snapshot.num_hits += 1
        within = [planned for planned in request.plan.segments if planned.origin < found.start]
        for planned, key in ((one, key) for one in within for key in one.keys):
            entry = self.store.find(key)
            if entry is not None:
                self._label(entry, planned)
        labels = request.plan.labels(found.start)
        self.expiry.label_snapshot(found.snapshot, labels, [planned.segment for planned in within], ())

    def _label(self, entry: CachedSegment, planned: PlannedSegment) -> None:
        self.expiry.label(entry, planned.segment)
        self.history.asked(entry.key, len(entry.ids), planned)
        self.tiers.renamed(entry)

    def _map_rows(self, request: Request, start: int) -> None:
        """Token slots by position: the snapshot's, and the request's own for rows."""
        held = request.held
        assert held is not None, "mapped for a request that holds nothing"
        if held.snapshot is not None:
            held.slots[:start] = held.snapshot.kv_slots
        own = self.pool.slots_of(held.pages, len(held.pages) * self.pool.page_size)
        for row in request.plan.rows:
            first = max(row.start, start)
            count = max(0, row.stop - first)
            held.slots[first : first + count] = own[held.num_own : held.num_own + count]
            held.num_own += count

    def _ask(
        self,
        request: Request,
        choices: Mapping[bytes, Choice],
        bases: Mapping[bytes, CachedSegment],
        entries: Mapping[bytes, CachedSegment] = MappingProxyType({}),
    ) -> None:
        """Interiors in prompt order: pin those that are there, begin to make the others, until slots run out. Of
        ``entries`` token ids were compared already."""
        held, encodes = request.held, list[Encode]()
        assert held is not None, "asked for a request that holds nothing"
        while held.wanted:
            span = held.wanted[0]
            entry = self._there(request, span, entries) or self._made(request, span, choices, bases, encodes)
            if entry is None:
                break
            held.wanted.popleft()
            held.entries[entry.key], held.last[entry.key] = entry, span.stop
            held.slots[span.start : span.stop] = entry.kv_slots
            self._label(entry, request.plan.segments[span.number])
            if held.in_pieces and request.plan.policy.deterministic:
                break
        if not held.wanted:
            self.pool.drop_pages(held.spare)
            held.spare = []
        self.jobs.begin(encodes)
        if self.jobs.away is not None and encodes and not request.stays:
            self.jobs.away.offer(encodes)

    def _there(self, request: Request, span: Interior, entries: Mapping[bytes, CachedSegment]) -> CachedSegment | None:
        """An entry that is there or being made, pinned; pages that were kept for it are given back."""
        held, key = request.held, span.key
        assert held is not None, "asked for a request that holds nothing"
        known, job = held.entries.get(key), self.jobs.find(key)
        entry = known or (job.entry if job else entries.get(key))
        if entry is None:
            entry = self.store.get(key, request.plan.ids_of(span))
        if entry is not None and held.in_pieces:
            self.pool.drop_pages(held.take_spare(self.jobs.need(span).pages))
        if entry is None or known is not None:
            return entry
        request.outcomes.setdefault(key, ("hit", ""))
        entry.num_hits += 1
        if job is not None:
            return self._joined(request, job)
        self.store.count(1, 0)
        self.store.pin(entry)
        return entry

    def _made(
        self,
        request: Request,
        span: Interior,
        choices: Mapping[bytes, Choice],
        bases: Mapping[bytes, CachedSegment],
        encodes: list[Encode],
    ) -> CachedSegment | None:
        """Begin to load or encode an entry, or ``None`` if there are no slots for it."""
        held, key = request.held, span.key
        assert held is not None, "asked for a request that holds nothing"
        choice = choices.get(key) or self.tiers.choose(key, request.plan.ids_of(span))
        base, pending = bases.get(key), choice.pending
        need = self.jobs.need(span, base, pending is not None)
        if not self.store.make_room(Need(states=need.states, transitions=need.transitions)):
            return None
        pages = held.take_spare(need.pages)
        if held.in_pieces:
            self.pool.drop_pages(held.take_spare(self.jobs.need(span).pages - need.pages))
        self.store.count(pending is not None, pending is None)
        if pending is not None:
            request.outcomes.setdefault(key, ("hit", ""))
            return self._joined(request, self.jobs.load(request, span, pages, pending))
        request.outcomes.setdefault(key, ("encoded", self._reason(request, span, base, choice.reason)))
        encodes.append(self.jobs.encode(request, span, pages, base))
        return self._joined(request, encodes[-1])

    def _joined(self, request: Request, job: Encode | Load) -> CachedSegment:
        job.waiters[request.id] = request
        self.store.pin(job.entry)
        if isinstance(job, Load):
            request.tiers.setdefault(job.entry.key, job.pending.tier.name)
        elif job.away and request.stays and self.jobs.away is not None:
            self.jobs.away.keep(job)
        return job.entry

    def _reason(self, request: Request, span: Interior, base: CachedSegment | None, given: str) -> str:
        planned = request.plan.segments[span.number]
        reason = self.history.met(planned.segment, planned.ids, span.key, span.seam, span.behind)
        if base is None:
            return given or reason
        request.continued[span.key] = base.num_cached
        return f"grown: {len(request.plan.ids_of(span)) - len(base.ids)} new tokens behind {len(base.ids)} known ones"
