"""Under which names entries were passed, and when they stop being used: times to live, soonest first.

A time is what ``time.time()`` tells, so that it holds across processes. An entry's time only ever gets sooner; an
older, later time of the same key stays in the heap and is passed over when it comes up. Knows keys, labels and times,
nothing of what they are of.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hypic.engine.segment import CachedSegment, Label, label_of
from hypic.types import Segment


def _for_ever(namespace: str | None) -> float | None:
    return None


@dataclass
class Expiry:
    """Keys by the time at which they expire; ``ttl_s`` gives a namespace's seconds to live, or ``None``."""

    ttl_s: Callable[[str | None], float | None] = _for_ever
    _times: dict[bytes, float] = field(default_factory=dict)
    _heap: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def next_s(self) -> float | None:
        """The soonest time, or ``None`` if nothing expires."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[bytes]:
        """Takes out the keys whose time has come."""
        keys = []
        while (soonest := self.next_s) is not None and soonest <= now_s:
            keys.append(heapq.heappop(self._heap)[1])
            del self._times[keys[-1]]
        return keys

    def label(self, entry: CachedSegment, segment: Segment) -> None:
        """An entry is known by every name under which it is asked for, and lives as long as the strictest asker says.

        A namespace's own time runs from when the entry was made.
        """
        is_new, label = not entry.labels, label_of(segment)
        if label in entry.labels and segment.ttl_s is None and entry.expires_s is None:
            return
        entry.labels.add(label)
        self.limit(entry, segment.ttl_s, self.ttl_s(segment.namespace) if is_new else None)

    def label_snapshot(
        self, snapshot: CachedSegment, labels: set[Label], segments: Iterable[Segment], inside: Iterable[CachedSegment]
    ) -> None:
        """A snapshot has the labels of all that it holds and lives as long as the shortest-lived of it."""
        snapshot.labels |= labels.union(*(entry.labels for entry in inside))
        times = [entry.expires_s - time.time() for entry in inside if entry.expires_s is not None]
        spaces = {label.namespace for label in labels} | {None}
        self.limit(snapshot, *times, *(segment.ttl_s for segment in segments), *map(self.ttl_s, spaces))

    def limit(self, entry: CachedSegment, *ttls_s: float | None) -> None:
        """An entry has only the least of these seconds to live, unless it had fewer."""
        now_s = time.time()
        self.end(entry, *(now_s + ttl_s for ttl_s in ttls_s if ttl_s is not None))

    def end(self, entry: CachedSegment, *times_s: float | None) -> None:
        """An entry is used until the soonest of these times, unless its own is sooner."""
        known = [time_s for time_s in (*times_s, entry.expires_s) if time_s is not None]
        entry.expires_s = min(known, default=None)
        self.watch(entry)

    def watch(self, entry: CachedSegment) -> None:
        """Takes note of an entry's time."""
        self.note(entry.key, entry.expires_s)

    def note(self, key: bytes, expires_s: float | None) -> None:
        """Takes note of a key's time, unless an earlier one is known."""
        if expires_s is not None and expires_s < self._times.get(key, float("inf")):
            self._times[key] = expires_s
            heapq.heappush(self._heap, (expires_s, key))


def is_over(entry: CachedSegment) -> bool:
    """Whether an entry must not be used any more."""
    return entry.expires_s is not None and entry.expires_s <= time.time()
