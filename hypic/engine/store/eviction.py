"""Who goes first when memory is short: the entry whose loss costs least for what it takes up.

GreedyDual-Size-Frequency (Cao and Irani 1997; Cherkasova 1998). Each time an entry comes to rest its value becomes

    value = inflation + uses * saved / size

``uses`` counts how often it was used, ``saved`` the tokens that a hit does not compute, ``size`` what it takes of that
which is short (bytes, pages, or one slot). The entry of least value goes first, and ``inflation`` becomes its value, so
whatever has not been used for long falls behind what is used now. All is found by a heap, in O(log n).
"""

from __future__ import annotations

import heapq
import itertools


class Ranking:
    """Keys in order of value, least first; equal values in the order in which they came to rest."""

    def __init__(self) -> None:
        self.inflation = 0.0
        self._heap: list[tuple[float, int, bytes]] = []
        self._latest: dict[bytes, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, key: bytes, uses: int, saved: float, size: float) -> None:
        """``key`` comes to rest; what was known of it before is forgotten."""
        number = self._latest[key] = next(self._numbers)
        heapq.heappush(self._heap, (self.inflation + uses * saved / size, number, key))
        if len(self._heap) > 2 * len(self._latest) + 64:
            self._heap = [item for item in self._heap if self._latest.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def discard(self, key: bytes) -> None:
        """``key`` is in use, or gone."""
        self._latest.pop(key, None)

    def pop(self) -> bytes | None:
        """The key of least value, taken out, or ``None`` if there is none."""
        while self._heap:
            value, number, key = heapq.heappop(self._heap)
            if self._latest.get(key) == number:
                del self._latest[key]
                self.inflation = max(self.inflation, value)
                return key
        return None
