"""The host tier: encoded entries in the host's memory, pinned where the device is a GPU, evicted by value.

Torch rounds pinned blocks up to powers of two; they count as what they take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from hypic.engine.store import encoding
from hypic.engine.store.eviction import Ranking
from hypic.engine.store.tier import Stored, TierStats


class HostTier:
    """At most ``budget_bytes``; ``leaving`` is told of every entry that is evicted."""

    name, blocks = "host", False

    def __init__(
        self, budget_bytes: int, pin: bool = False, leaving: Callable[[bytes, Tensor], None] | None = None
    ) -> None:
        self.budget_bytes, self.pin, self.leaving = budget_bytes, pin, leaving
        self._buffers: dict[bytes, Tensor] = {}
        self._stored: dict[bytes, Stored] = {}
        self._uses: dict[bytes, int] = {}
        self._ranking = Ranking()
        self._held_bytes = 0
        self._counts = dict.fromkeys(("hits", "stored", "evictions"), 0)
        self._lock = threading.RLock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._buffers

    def find(self, key: bytes) -> Stored | None:
        return self._stored.get(key)

    def get(self, key: bytes) -> Tensor | None:
        """The entry's buffer, which stays as it is even when the entry is evicted meanwhile."""
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                return None
            self._counts["hits"] += 1
            self._uses[key] += 1
            self._rank(key)
            return buffer

    def put(self, key: bytes, buffer: Tensor) -> bool:
        num_bytes = self._real_bytes(buffer)
        with self._lock:
            if key in self._buffers:
                return True
            if num_bytes > self.budget_bytes:
                return False
            leaving = self._make_room(num_bytes)
            held = buffer.pin_memory() if self.pin and not buffer.is_pinned() else buffer
            about = encoding.decode_about(held)
            self._buffers[key], self._stored[key] = held, Stored.of(about, num_bytes)
            self._uses[key] = 1
            self._held_bytes += num_bytes
            self._counts["stored"] += 1
            self._rank(key)
        for gone, data in leaving:
            if self.leaving is not None:
                self.leaving(gone, data)
        return True

    def remove(self, key: bytes) -> bool:
        with self._lock:
            return self._take(key) is not None

    def entries(self) -> list[Stored]:
        with self._lock:
            return [replace(stored, hits=self._uses[key] - 1) for key, stored in self._stored.items()]

    @property
    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(len(self._buffers), self._held_bytes, self.budget_bytes, **self._counts)

    def close(self) -> None:
        with self._lock:
            for key in list(self._buffers):
                self._take(key)

    def _real_bytes(self, buffer: Tensor) -> int:
        return 1 << (len(buffer) - 1).bit_length() if self.pin else len(buffer)

    def _rank(self, key: bytes) -> None:
        stored = self._stored[key]
        self._ranking.add(key, self._uses[key], stored.num_saved, stored.num_bytes)

    def _make_room(self, num_bytes: int) -> list[tuple[bytes, Tensor]]:
        gone = []
        while self._held_bytes + num_bytes > self.budget_bytes:
            key = self._ranking.pop()
            assert key is not None, "all that is held is ranked"
            buffer = self._take(key)
            assert buffer is not None, "all that is ranked is held"
            self._counts["evictions"] += 1
            gone.append((key, buffer))
        return gone

    def _take(self, key: bytes) -> Tensor | None:
        buffer = self._buffers.pop(key, None)
        if buffer is not None:
            del self._stored[key], self._uses[key]
            self._held_bytes -= self._real_bytes(buffer)
            self._ranking.discard(key)
        return buffer
