"""The device tier: entries that live in the pool, evicted least recently used, never while pinned.

Entries that no request uses stand in one ordered table, oldest first; a pinned entry is taken out of it and returns as
the youngest. So the oldest evictable entry is found at once, and nothing ever scans all entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from hypic.engine.pool import Need, Pool
from hypic.engine.segment import CachedSegment


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
    """Entries by key; ``budget_bytes`` caps what unpinned entries may hold (``None``: the whole pool)."""

    def __init__(self, pool: Pool, budget_bytes: int | None) -> None:
        self.pool, self.budget_bytes = pool, budget_bytes
        self._idle: OrderedDict[bytes, CachedSegment] = OrderedDict()
        self._pinned: dict[bytes, CachedSegment] = {}
        self._idle_bytes = 0
        self._counts = dict.fromkeys(("hits", "misses", "stored", "evictions"), 0)

    def __contains__(self, key: bytes) -> bool:
        return key in self._idle or key in self._pinned

    def __iter__(self) -> Iterator[CachedSegment]:
        yield from (*self._idle.values(), *self._pinned.values())

    def get(self, key: bytes, ids: tuple[int, ...]) -> CachedSegment | None:
        """The entry of ``key``, if its token ids are ``ids``; not pinned yet, and not counted."""
        entry = self._pinned.get(key) or self._idle.get(key)
        return entry if entry is not None and entry.ids == ids else None

    def find(self, key: bytes) -> CachedSegment | None:
        """The entry of ``key``, whatever its tokens."""
        return self._pinned.get(key) or self._idle.get(key)

    def count(self, hits: int, misses: int) -> None:
        """Take note of a request's look-ups, once it is admitted."""
        self._counts["hits"] += hits
        self._counts["misses"] += misses

    def put(self, entry: CachedSegment) -> None:
        """Take over an entry's pages and slots. A key that is there already keeps its first entry."""
        if entry.is_forgotten and entry.pins:
            return  # goes with its last user
        if entry.is_forgotten or entry.key in self:
            self.release(entry)
            return
        self._counts["stored"] += 1
        if entry.pins:
            self._pinned[entry.key] = entry
            return
        self._rest(entry)

    def pin(self, entry: CachedSegment) -> None:
        """Keep an entry from being evicted until ``unpin``."""
        if entry.pins == 0 and self._idle.pop(entry.key, None) is not None:
            self._idle_bytes -= entry.num_bytes
            self._pinned[entry.key] = entry
        entry.pins += 1

    def unpin(self, entry: CachedSegment) -> None:
        assert entry.pins > 0, "an entry is unpinned more often than pinned"
        entry.pins -= 1
        if entry.pins == 0 and entry.is_forgotten:
            self.release(entry)
        elif entry.pins == 0 and self._pinned.pop(entry.key, None) is not None:
            self._rest(entry)

    def make_room(self, need: Need) -> bool:
        """Evict, oldest first, until the pool can meet ``need``; whether it can."""
        while self.pool.lacks(need) and self._evict():
            pass
        return not self.pool.lacks(need)

    def remove(self, key: bytes) -> bool:
        """Forget an entry that nobody uses; whether there was one."""
        entry = self._idle.pop(key, None)
        if entry is None:
            return False
        self._idle_bytes -= entry.num_bytes
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

    def _rest(self, entry: CachedSegment) -> None:
        self._idle[entry.key] = entry
        self._idle_bytes += entry.num_bytes
        while self.budget_bytes is not None and self._idle_bytes > self.budget_bytes and self._evict():
            pass

    def _evict(self) -> bool:
        if not self._idle:
            return False
        key, entry = self._idle.popitem(last=False)
        self._idle_bytes -= entry.num_bytes
        self._counts["evictions"] += 1
        self.release(entry)
        return True
