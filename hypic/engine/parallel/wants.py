"""Entries that were asked of peers and have not come: each under a nonce of its own, and how long each is waited for.

An answer counts only if it carries the nonce, and comes from the very process that was asked: that is the fence. What
was given up, cancelled or answered is not in the table any more, so whatever still comes of it is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from hypic.engine.segment import CachedSegment

# What a peer's last word says of it: none came lately; it waits for work; it works.
Life = Literal["silent", "idle", "at work"]


@dataclass(frozen=True)
class Pending:
    """One request for one entry; ``peer`` is rank and generation, times are of the monotonic clock.

    ``late`` is how late this peer was of late: what it took over what was predicted. ``is_made``: the peer has it, and
    said so; ``held_up_s`` is since when it waits for room here, 0 if it does not. That is not the peer's time: when it
    ends, ``asked_s`` is put off by as much.
    """

    nonce: int
    entry: CachedSegment
    peer: tuple[int, int]
    is_fetch: bool
    asked_s: float
    predicted_s: float
    attempt: int = 0
    late: float = 1.0
    is_made: bool = False
    held_up_s: float = 0.0

    @property
    def key(self) -> bytes:
        return self.entry.key


@dataclass(frozen=True)
class Patience:
    """For how long a peer that was asked is waited for, by what its heartbeats say.

    One that is silent, for ``factor`` times what it should take; one that has nothing to do and yet has not answered,
    for as much again as it was late before; one that works, until ``most_s``, or four times that if it is longer: a
    slow worker is not a dead one. Never less than ``least_s``.
    """

    factor: float = 4.0
    least_s: float = 1.0
    most_s: float = 60.0

    def seconds(self, pending: Pending, life: Life) -> float:
        """From when it was asked."""
        silent_s = max(self.least_s, self.factor * pending.predicted_s)
        idle_s = max(silent_s, self.factor * pending.late * pending.predicted_s)
        return {"silent": silent_s, "idle": idle_s, "at work": max(self.most_s, 4 * idle_s)}[life]


@dataclass
class Wants:
    """The table; safe from any thread."""

    _pending: dict[int, Pending] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, pending: Pending) -> None:
        with self._lock:
            self._pending[pending.nonce] = pending

    def find(self, nonce: int, peer: tuple[int, int]) -> Pending | None:
        """What was asked of this peer under this nonce, if it is still wanted."""
        with self._lock:
            pending = self._pending.get(nonce)
        return pending if pending is not None and pending.peer == peer else None

    def rank_of(self, nonce: int) -> int | None:
        """Who was asked, if it is still wanted."""
        with self._lock:
            pending = self._pending.get(nonce)
        return None if pending is None else pending.peer[0]

    def take(self, nonce: int) -> Pending | None:
        """Out of the table; ``None`` if it was taken before."""
        with self._lock:
            return self._pending.pop(nonce, None)

    def hold_up(self, nonce: int, now: float) -> None:
        """The peer has it, and there is no room: it is waited for without end, until ``go_on``."""
        with self._lock:
            if (pending := self._pending.get(nonce)) is not None:
                self._pending[nonce] = replace(pending, is_made=True, held_up_s=now)

    def go_on(self, nonce: int, now: float) -> Pending | None:
        """There is room for it, if it is still wanted."""
        with self._lock:
            pending = self._pending.get(nonce)
            if pending is not None and pending.held_up_s:
                asked_s = pending.asked_s + now - pending.held_up_s
                pending = self._pending[nonce] = replace(pending, asked_s=asked_s, held_up_s=0.0)
            return pending

    def overdue(self, now: float, patience: Patience, life: Callable[[tuple[int, int]], Life]) -> list[Pending]:
        """Out of the table: all that have been waited for long enough, given how their peers are."""
        asked = [p for p in self._all() if not p.held_up_s]
        return self._take_all([p for p in asked if now - p.asked_s >= patience.seconds(p, life(p.peer))])

    def waiting(self) -> list[Pending]:
        """All that is awaited, in the order in which it was asked."""
        return self._all()

    def of(self, peer: tuple[int, int]) -> list[Pending]:
        """Out of the table: all that were asked of a peer."""
        return self._take_all([p for p in self._all() if p.peer == peer])

    def _all(self) -> list[Pending]:
        with self._lock:
            return list(self._pending.values())

    def _take_all(self, found: Iterable[Pending]) -> list[Pending]:
        return [p for p in found if self.take(p.nonce) is not None]


@dataclass
class Counts:
    """What went over to others and what came of it; ``carry_s`` are seconds that bytes were on their way, ``plan_s``
    those that planning took, ``last_came_s`` is when the last entry had come, by the monotonic clock; ``taken_back``
    were asked and then encoded here, since this worker had nothing else to do. ``handled`` entries came in ``parcels``
    and took ``pack_s`` of their senders' processors, ``check_s`` of this one's and ``write_s`` of its engine's time.
    """

    asked: int = 0
    came: int = 0
    fetched: int = 0
    came_bytes: int = 0
    carry_s: float = 0.0
    plan_s: float = 0.0
    fell_back: int = 0
    late: int = 0
    last_came_s: float = 0.0
    handled: int = 0
    parcels: int = 0
    pack_s: float = 0.0
    check_s: float = 0.0
    write_s: float = 0.0
    taken_back: int = 0
