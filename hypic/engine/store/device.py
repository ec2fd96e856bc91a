"""The device tier: entries that live in the pool, evicted by value (``eviction.py``), never while pinned.

Pages and slots run short apart from each other, so idle entries are ranked once for each: where states are short an
entry is worth its tokens, where pages are short its tokens a page. Nothing ever scans all entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypic.engine.pool import Pool
from hypic.engine.segment import CachedSegment
from hypic.engine.sizing import Need
from hypic.engine.store.eviction import Ranking
from hypic.engine.token_ids import are_same


@dataclass(frozen=True)
class StoreStats:
    """Counters since the start, and what is held now."""

    num_entries: int
    num_pinned: int
    held_bytes: int
    budget_bytes: int | None
    hits: int
    misses: int
    stored: int
    evictions: int


class DeviceStore:
    """Entries by key; ``budget_bytes`` caps what unpinned entries may hold (``None``: the whole pool).

    ``leaving`` is told of every entry that is evicted, while it still holds what it held. ``num_lent`` pins are other
    workers', and end without a step here: who finds no memory meanwhile has only to wait.
    """

    def __init__(self, pool: Pool, budget_bytes: int | None) -> None:
        self.pool, self.budget_bytes = pool, budget_bytes
        self.leaving: Callable[[CachedSegment], None] | None = None
        self._idle: dict[bytes, CachedSegment] = {}
        self._pinned: dict[bytes, CachedSegment] = {}
        self._rankings = {short: Ranking() for short in ("bytes", "pages", "states", "transitions")}
        self._idle_bytes = self._idle_pages = self.num_lent = 0
        self._counts = dict.fromkeys(("hits", "misses", "stored", "evictions"), 0)

    def __contains__(self, key: bytes) -> bool:
        return key in self._idle or key in self._pinned

    def __iter__(self) -> Iterator[CachedSegment]:
        yield from (*self._idle.values(), *self._pinned.values())

    def get(self, key: bytes, ids: tuple[int, ...]) -> CachedSegment | None:
        """The entry of ``key``, if its token ids are ``ids``; not pinned yet, and not counted."""
        entry = self.find(key)
        return entry if entry is not None and (are_same(entry.ids, ids)) else None

    def find(self, key: bytes) -> CachedSegment | None:
        """The entry of ``key``, whatever its tokens."""
        return self._pinned.get(key) or self._idle.get(key)

    def count(self, hits: int, misses: int) -> None:
        """Take note of a request's look-ups, once it is admitted."""
        self._counts["hits"] += hits
        self._counts["misses"] += misses

    def put(self, entry: CachedSegment, is_new: bool = True) -> None:
        """Take over an entry's pages and slots. A key that is there already keeps its first entry."""
        if entry.is_forgotten and entry.pins:
            return  # goes with its last user
        if entry.is_forgotten or entry.key in self:
            self.release(entry)
            return
        self._counts["stored"] += is_new
        if entry.pins:
            self._pinned[entry.key] = entry
            return
        self._rest(entry)

    def pin(self, entry: CachedSegment) -> None:
        """Keep an entry from being evicted until ``unpin``; it counts as a use."""
        if entry.pins == 0 and self._take(entry.key) is not None:
            self._pinned[entry.key] = entry
        entry.pins += 1
        entry.uses += 1

    def unpin(self, entry: CachedSegment, is_use: bool = True) -> None:
        """``is_use=False`` takes back that the pin was one."""
        assert entry.pins > 0, "an entry is unpinned more often than pinned"
        entry.pins -= 1
        entry.uses -= 0 if is_use else 1
        if entry.pins == 0 and entry.is_forgotten:
            self.release(entry)
        elif entry.pins == 0 and self._pinned.pop(entry.key, None) is not None:
            self._rest(entry)

    def lend(self, entry: CachedSegment) -> None:
        """Pin an entry until another worker has it."""
        self.pin(entry)
        self.num_lent += 1

    def take_back(self, entry: CachedSegment) -> None:
        """One that was lent was sent; that was no use."""
        self.num_lent -= 1
        self.unpin(entry, is_use=False)

    def make_room(self, need: Need) -> bool:
        """Evict, least value first, until the pool can meet ``need``; whether it can. Evicts nothing for what it
        cannot reach anyway."""
        if not self._could_make(need):
            return False
        while (short := self._short_of(need)) is not None:
            if not self._evict(short):
                return False
        return True

    def remove(self, key: bytes) -> bool:
        """Forget an entry that nobody uses; whether there was one."""
        entry = self._take(key)
        if entry is None:
            return False
        self.release(entry)
        return True

    def forget(self, entry: CachedSegment) -> None:
        """Find an entry no more; requests that use it right now keep it to their end."""
        if not self.remove(entry.key):
            self._pinned.pop(entry.key, None)
            entry.is_forgotten = True

    def clear(self) -> int:
        """Forget all entries that nobody uses; how many."""
        return sum(self.remove(key) for key in list(self._idle))

    def demote_all(self) -> int:
        """Evict all entries that nobody uses, as if memory were short; how many."""
        evictions = self._counts["evictions"]
        while self._evict("states"):
            pass
        return self._counts["evictions"] - evictions

    def release(self, entry: CachedSegment) -> None:
        """Give an entry's pages and slots back to the pool."""
        self.pool.drop_pages(entry.pages)
        self.pool.drop_state(entry.state_slot)
        if entry.transition_slot is not None:
            self.pool.drop_transition(entry.transition_slot)

    @property
    def stats(self) -> StoreStats:
        held = self._idle_bytes + sum(entry.num_bytes for entry in self._pinned.values())
        entries = len(self._idle) + len(self._pinned)
        return StoreStats(entries, len(self._pinned), held, self.budget_bytes, **self._counts)

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _could_make(self, need: Need) -> bool:
        """Whether evicting everything idle could do; shared pages may still make it too little."""
        free = self.pool.free
        idle = Need(self._idle_pages, len(self._rankings["states"]), len(self._rankings["transitions"]))
        most = free + idle
        return need.pages <= most.pages and need.states <= most.states and need.transitions <= most.transitions

    def _short_of(self, need: Need) -> str | None:
        free = self.pool.free
        wanting = {
            "transitions": need.transitions > free.transitions,
            "states": need.states > free.states,
            "pages": need.pages > free.pages,
        }
        return next((name for name, is_short in wanting.items() if is_short), None)

    def _rest(self, entry: CachedSegment) -> None:
        self._idle[entry.key] = entry
        self._idle_bytes += entry.num_bytes
        self._idle_pages += len(entry.pages)
        sizes = {"pages": len(entry.pages), "states": 1, "transitions": 0 if entry.is_snapshot else 1}
        if self.budget_bytes is not None:
            sizes["bytes"] = entry.num_bytes
        for short, size in sizes.items():
            if size:
                self._rankings[short].add(entry.key, 1 + entry.uses, entry.num_saved, size)
        while self.budget_bytes is not None and self._idle_bytes > self.budget_bytes and self._evict("bytes"):
            pass

    def _take(self, key: bytes) -> CachedSegment | None:
        """An idle entry, no longer idle."""
        entry = self._idle.pop(key, None)
        if entry is None:
            return None
        self._idle_bytes -= entry.num_bytes
        self._idle_pages -= len(entry.pages)
        for ranking in self._rankings.values():
            ranking.discard(key)
        return entry

    def _evict(self, short: str) -> bool:
        key = self._rankings[short].pop()
        if key is None:
            return False
        entry = self._take(key)
        assert entry is not None, "only idle entries are ranked"
        self._counts["evictions"] += 1
        if self.leaving is not None:
            self.leaving(entry)
        self.release(entry)
        return True
