"""What there is of a request in caches and jobs, and what of the pool it needs for the rest. Takes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hypic.engine.jobs import Jobs
from hypic.engine.plan import Interior, Mark
from hypic.engine.pool import Pool
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment
from hypic.engine.sizing import Need
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.expiry import is_over
from hypic.engine.store.history import History
from hypic.engine.store.tiered import Choice, Tiered
from hypic.errors import PromptTooLong, StoreFull

ONE_ENCODE = Need(states=2, transitions=1)


@dataclass(frozen=True)
class Found:
    """What there is of a request: a head, entries by key, jobs that make one, and how to come by the others."""

    snapshot: CachedSegment | None
    wanted: dict[bytes, Interior]
    entries: dict[bytes, CachedSegment]
    choices: dict[bytes, Choice]
    bases: dict[bytes, CachedSegment]

    @property
    def start(self) -> int:
        return self.snapshot.num_cached if self.snapshot is not None else 0

    @property
    def pinned(self) -> list[CachedSegment]:
        head = [self.snapshot] if self.snapshot is not None else []
        return [*head, *self.entries.values(), *self.bases.values()]


@dataclass(frozen=True)
class Lookup:
    """See the module's docstring."""

    pool: Pool
    store: DeviceStore
    tiers: Tiered
    jobs: Jobs
    history: History

    def check(self, request: Request, max_context: int) -> None:
        """Whether a request could ever run.

        Raises:
            PromptTooLong: the prompt does not fit the context.
            StoreFull: it needs more than the whole memory.
        """
        num = len(request.prompt.ids)
        if num >= max_context:
            raise PromptTooLong(
                f"the prompt has {num} tokens and the context holds {max_context}; leave room for the answer: "
                "shorten it or pass fewer segments."
            )
        if not self.could_run(request):
            need = self.in_pieces(request, 0) if self._has_rows(request) else self.whole(request)
            capacity = self.pool.capacity
            raise StoreFull(
                f"the prompt needs {need.pages} pages, {need.states} state slots and {need.transitions} transition "
                f"slots, and the pool that memory= sizes holds {capacity.pages}, {capacity.states} and "
                f"{capacity.transitions}; raise memory= or pass fewer segments."
            )

    def prefetch(self, request: Request) -> None:
        """A request waits: what the tiers below have of its segments begins to be read."""
        if self.tiers.tiers and request.max_tokens:
            for key, span in request.keys(0).items():
                if self.store.find(key) is None and not self.jobs.has(key):
                    self.tiers.choose(key, request.plan.ids_of(span))

    def known(self, request: Request) -> tuple[int, int]:
        """How far a snapshot reaches into a prompt, and how many of the entries behind it are to be encoded."""
        found = self.find(request)
        return found.start, sum(choice.pending is None for choice in found.choices.values())

    def find(self, request: Request) -> Found:
        """The longest head that is kept, then the interiors behind it."""
        snapshot = next((entry for mark in reversed(request.plan.marks) if (entry := self._at(request, mark))), None)
        wanted = request.keys(snapshot.num_cached if snapshot is not None else 0)
        ids_of = request.plan.ids_of
        found = {key: self._fresh(self.store.get(key, ids_of(span))) for key, span in wanted.items()}
        missing = {k: s for k, s in wanted.items() if found[k] is None and not self.jobs.has(k)}
        choices = {key: self.tiers.choose(key, ids_of(span)) for key, span in missing.items()}
        bases = self._bases(request, {key: span for key, span in missing.items() if choices[key].pending is None})
        entries = {key: entry for key, entry in found.items() if entry is not None}
        return Found(snapshot, wanted, entries, choices, bases)

    def _at(self, request: Request, mark: Mark) -> CachedSegment | None:
        if mark.digest not in self.store:
            return None
        return self._fresh(self.store.get(mark.digest, request.plan.ids[: mark.position]))

    def _fresh(self, entry: CachedSegment | None) -> CachedSegment | None:
        """An entry, unless its time is over."""
        if entry is not None and is_over(entry):
            self.history.expired(entry.key)
            self.store.forget(entry)
            return None
        return entry

    def _bases(self, request: Request, missing: dict[bytes, Interior]) -> dict[bytes, CachedSegment]:
        """Entries that missing ones continue: what was encoded last under the same name, if the text only grew.

        A deterministic request starts from nothing, so that its bits do not depend on what is cached, and so do
        entries that are not kept lossless: what they hold must not depend on how often they were rounded.
        """
        if request.plan.policy.deterministic or not self.pool.form.is_lossless:
            return {}
        bases = {key: self._base(request, span) for key, span in missing.items()}
        return {key: base for key, base in bases.items() if base is not None}

    def _base(self, request: Request, span: Interior) -> CachedSegment | None:
        segment, ids = request.plan.segments[span.number].segment, request.plan.ids_of(span)
        key = self.history.previous(segment, span.behind)
        base = None if key is None else self._fresh(self.store.find(key))
        if base is None or base.is_snapshot or base.namespace != segment.namespace:
            return None
        is_grown = len(base.ids) < len(ids) and ids[: len(base.ids)] == base.ids
        # Every step of growth leaves a page partly filled: entries of twice the pages they need are made anew.
        is_dense = len(base.pages) <= 2 * self.pool.pages_for(base.num_cached)
        is_alike = len(base.ids) - base.num_cached == span.seam and base.primer == span.behind
        return base if is_grown and is_dense and is_alike else None

    def own(self, request: Request, start: int) -> Need:
        """Pages of the rows from ``start`` on, and the running state if there is to be one."""
        return Need(self.pool.pages_for(request.rows_from(start) + 1), states=0 if request.only_warms else 1)

    def whole(self, request: Request) -> Need:
        """All that a request may need at once: nothing of it is there."""
        own, needs = self.own(request, 0), [self.jobs.need(span) for span in request.keys(0).values()]
        pages = sum([need.pages for need in needs])
        return own + Need(pages, sum([need.states for need in needs]), sum([need.transitions for need in needs]))

    def in_pieces(self, request: Request, start: int) -> Need:
        """What a request needs to run in pieces: pages for all of it, and slots for one interior after the other.

        An interior that stands twice may be gone when it is needed again, so its pages count twice.
        """
        need = self.own(request, start) + ONE_ENCODE
        for span in request.interiors(start):
            need += Need(pages=self.jobs.need(span).pages)
        return need

    def could_run(self, request: Request) -> bool:
        """Whether the empty pool could hold a request, whole or in pieces.

        Where interiors stand side by side there is no row to be run between them, nor is one where segments are only
        warmed.
        """
        whole = self.pool.could_hold(self.whole(request))
        return whole or (self._has_rows(request) and self.pool.could_hold(self.in_pieces(request, 0)))

    def _has_rows(self, request: Request) -> bool:
        """Whether a row is run between any two interiors, which gives back what the first one held."""
        return request.max_tokens > 0 and request.plan.is_interleaved
