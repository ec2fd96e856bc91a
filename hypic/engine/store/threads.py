"""The two threads of a store whose tiers may block: one reads what requests will need, one writes behind them.

Neither ever makes a request wait for a write: the queue of writes has a limit in bytes, and what does not fit is not
written.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hypic.engine.store.image import EntryImage
from hypic.engine.store.tier import Tier

logger = logging.getLogger("hypic")


@dataclass(eq=False)
class Pending:
    """An entry that is being fetched. ``is_over`` once it is read or lost; ``image`` stays ``None`` if it is lost.

    ``is_claimed``: pages and slots are waiting for it; ``is_unwanted``: it was forgotten meanwhile; ``is_extra``: it is
    not worth waiting for. ``began`` and ``event`` are when the copies into the device begin and end: the device's
    events, or times.
    """

    key: bytes
    ids: tuple[int, ...]
    tier: Tier
    num_bytes: int
    image: EntryImage | None = None
    is_over: bool = False
    is_claimed: bool = False
    is_unwanted: bool = False
    is_extra: bool = False
    began: object = None
    event: object = None

    @property
    def is_lost(self) -> bool:
        return self.is_over and self.image is None


class Reader:
    """Runs ``read`` for one pending entry after the other, in the order in which they were asked for."""

    def __init__(self, read: Callable[[Pending], None]) -> None:
        self._read, self._queue, self._num_bytes = read, deque[Pending](), 0
        self._changed, self._closed = threading.Condition(), False
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """What stands in the queue, with what is being read."""
        return self._num_bytes

    def submit(self, pending: Pending) -> None:
        with self._changed:
            if self._closed:
                pending.is_over = True
                return
            self._queue.append(pending)
            self._num_bytes += pending.num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hypic-reader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until something that was asked for is over, or the time is."""
        with self._changed:
            if self._num_bytes:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for pending in self._queue:
                pending.is_over = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                pending = self._queue.popleft()
            try:
                self._read(pending)
            except Exception:  # whatever a tier does, the entry is only a miss
                logger.exception("an entry could not be read")
            with self._changed:
                pending.is_over = True
                self._num_bytes -= pending.num_bytes
                self._changed.notify_all()


class Writer:
    """Writes behind: at most ``max_bytes`` wait; what does not fit is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_dropped = max_bytes, 0
        self._queue: OrderedDict[bytes, tuple[Sequence[Tier], Tensor]] = OrderedDict()
        self._num_bytes, self._current = 0, b""
        self._changed, self._closed = threading.Condition(), False
        self._thread: threading.Thread | None = None

    def has_room(self, num_bytes: int) -> bool:
        """An empty queue takes an entry of any size."""
        return not self._queue or self._num_bytes + num_bytes <= self.max_bytes

    def submit(self, tiers: Sequence[Tier], key: bytes, buffer: Tensor) -> bool:
        with self._changed:
            if key in self._queue or self._closed:
                return key in self._queue
            if not self.has_room(len(buffer)):
                self.num_dropped += 1
                return False
            self._queue[key] = (tiers, buffer)
            self._num_bytes += len(buffer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hypic-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def peek(self, key: bytes) -> Tensor | None:
        """An entry that is on its way out."""
        item = self._queue.get(key)
        return None if item is None else item[1]

    def waiting(self) -> list[tuple[bytes, Tensor]]:
        """All that is on its way out."""
        with self._changed:
            return [(key, buffer) for key, (_, buffer) in self._queue.items()]

    def withdraw(self, key: bytes) -> bool:
        """Not to be written any more, without waiting; false if it is being written right now."""
        with self._changed:
            if self._current == key:
                return False
            self._take(key)
            return True

    def discard(self, key: bytes) -> bool:
        """Not to be written any more; one that is being written is waited for. Whether it was on its way."""
        with self._changed:
            was_there = key in self._queue
            if self._current != key:
                self._take(key)
            self._changed.wait_for(lambda: self._current != key)
            return was_there

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is written, or the time is over; whether all is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what can be written in that time, and no more."""
        if not self.drain(timeout_s):
            logger.warning("%d entries were not written in %.0f s and are not kept.", len(self._queue), timeout_s)
        with self._changed:
            self._closed = True
            for key in [key for key in self._queue if key != self._current]:
                self._take(key)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _take(self, key: bytes) -> None:
        item = self._queue.pop(key, None)
        self._num_bytes -= len(item[1]) if item is not None else 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                self._current = next(iter(self._queue))
                tiers, buffer = self._queue[self._current]
            try:
                for tier in tiers:
                    tier.put(self._current, buffer)
            except Exception:  # whatever a tier does, the entry is only not kept
                logger.exception("an entry could not be written")
            with self._changed:
                self._take(self._current)
                self._current = b""
                self._changed.notify_all()
