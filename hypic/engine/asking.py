"""What this engine asks of its peers: the connections, the table of what has not come, the room for it, and what is
known of each peer.

One lock guards what is known (``view``); the table and the connections have their own. Not here: which peer is asked
for what (``placing.py``), and what becomes of what comes or fails to come (``peers.py``).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from hypic.engine.parallel import messages
from hypic.engine.parallel.caller import Events, Self
from hypic.engine.parallel.connections import Connections
from hypic.engine.parallel.messages import Cancel, Go, Parcel, Ready, Want
from hypic.engine.parallel.room import Room
from hypic.engine.parallel.view import View
from hypic.engine.parallel.wants import Counts, Pending, Wants
from hypic.engine.payload import margin_bytes, want_of
from hypic.engine.pool import Layout


class Asking:
    """Safe from any thread. ``layout`` is that of this engine's pool."""

    def __init__(self, me: Self, events: Events, room: Room, layout: Layout) -> None:
        self._margin_bytes = margin_bytes(layout)
        self.view, self.wants, self.counts, self.room = View(), Wants(), Counts(), room
        self.connections = Connections(me, events)
        self.lock = threading.RLock()
        self._nonces = itertools.count(1)

    def nonce(self) -> int:
        """A name that no request for an entry had before."""
        return next(self._nonces)

    def ask(self, asked: Sequence[Pending], is_trial: bool = False) -> None:
        """All that one peer is asked for goes in one message."""
        by_peer: dict[tuple[int, int], list[Want]] = {}
        waits = {one.nonce for one in _in_turns(asked) if not self.room.promise(one.nonce, self._bytes(one))}
        for pending in asked:
            self.wants.add(pending)
            by_peer.setdefault(pending.peer, []).append(want_of(pending, is_trial, pending.nonce in waits))
        for peer, wants in by_peer.items():
            self.connections.tell(peer, messages.Wants(tuple(wants)))

    def may_come(self, peer: tuple[int, int], parcel: Parcel, largest_bytes: int) -> bool:
        """Whether announced entries were told to come or are wanted no more, and are no larger than the room for them;
        no entry is larger than ``largest_bytes``."""
        most_bytes = 0
        for entry in parcel.entries:
            pending = self.wants.find(entry.nonce, peer)
            if pending is not None and not self.room.may_come(entry.nonce):
                return False
            most_bytes += largest_bytes if pending is None else self._bytes(pending)
        return parcel.num_bytes <= most_bytes

    def is_ready(self, peer: tuple[int, int], message: Ready) -> None:
        """A peer has it: it comes next, or in its turn if there was no room for it."""
        pending, now = self.wants.find(message.nonce, peer), time.monotonic()
        if pending is None or pending.is_made:
            return
        with self.lock:
            self.view.made(pending, now)
        if self.room.may_come(message.nonce):
            return
        self.wants.hold_up(message.nonce, now)
        self._call(self.room.ready(message.nonce))

    def end(self, nonces: Iterable[int]) -> None:
        """These came and are in the pool, or are out of the table for another reason: others may come."""
        self._call(self.room.end(nonces))

    def _bytes(self, pending: Pending) -> int:
        """What comes is no larger: its memory in the pool is taken already."""
        return pending.entry.num_bytes + self._margin_bytes

    def _call(self, nonces: Sequence[int]) -> None:
        now, by_peer = time.monotonic(), dict[tuple[int, int], list[int]]()
        for nonce in nonces:
            pending = self.wants.go_on(nonce, now)
            if pending is not None:
                by_peer.setdefault(pending.peer, []).append(nonce)
        for peer, found in by_peer.items():
            self.connections.tell(peer, Go(tuple(found)))

    def take_back(self, nonce: int) -> bool:
        """Nobody needs it any more; whether it had not come yet."""
        pending = self.wants.take(nonce)
        if pending is not None:
            self.given_up(pending)
        return pending is not None

    def given_up(self, pending: Pending) -> None:
        """Tell a peer of what is out of the table."""
        self.connections.tell(pending.peer, Cancel(pending.nonce))
        self.end([pending.nonce])


def _in_turns(asked: Sequence[Pending]) -> Iterator[Pending]:
    """The first of each peer, then the second of each, and so on."""
    by_peer: dict[tuple[int, int], list[Pending]] = {}
    for pending in asked:
        by_peer.setdefault(pending.peer, []).append(pending)
    for turn in itertools.zip_longest(*by_peer.values()):
        yield from (pending for pending in turn if pending is not None)
