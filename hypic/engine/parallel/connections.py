"""The connections of one process to its peers: one each, made again when it breaks, from then on by socket alone."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from hypic.engine.parallel.caller import Caller, Events, Self
from hypic.engine.parallel.messages import Hello, Message

RECONNECT_S = 0.5
# Two workers that have not agreed by then on how entries travel try again, with nothing but a socket.
CONNECT_S = 60.0


class Connections:
    """Callers by rank; safe from any thread."""

    def __init__(self, me: Self, events: Events) -> None:
        self._me, self._events = me, events
        self._callers: dict[int, Caller] = {}
        self._retry_s: dict[int, float] = {}
        self._plain: set[tuple[int, int]] = set()
        self._is_over = False
        self._lock = threading.RLock()

    def __contains__(self, rank: object) -> bool:
        return rank in self._callers

    def keep(self, hellos: Iterable[Hello], now: float) -> None:
        """Call those of these that are not called yet."""
        with self._lock:
            callers = list(self._callers.values())
        for caller in callers:
            if not caller.is_connected and now - caller.since_s > CONNECT_S:
                caller.close("no connection could be made to it in time")
        with self._lock:
            for hello in hellos:
                rank = hello.rank
                if rank in self._callers or now < self._retry_s.get(rank, 0.0) or self._is_over:
                    continue
                is_plain = (rank, hello.generation) in self._plain
                me = replace(self._me, carrier="socket") if is_plain else self._me
                self._callers[rank] = Caller(me, hello, self._events)

    def end_others(self, peers: Iterable[tuple[int, int]]) -> None:
        """End the connections to all but these."""
        left = set(peers)
        with self._lock:
            gone = [caller for caller in self._callers.values() if caller.peer not in left]
        for caller in gone:
            caller.close("the worker has left")

    def tell(self, peer: tuple[int, int], message: Message) -> None:
        """To just this process, if it is called."""
        caller = self._callers.get(peer[0])
        if caller is not None and caller.peer == peer:
            caller.send(message)

    def lost(self, caller: Caller, now: float) -> None:
        """A connection ended; the next one to the same process needs nothing but a socket."""
        rank = caller.peer[0]
        with self._lock:
            if self._callers.get(rank) is caller:
                del self._callers[rank]
            self._retry_s[rank] = now + RECONNECT_S
            self._plain.add(caller.peer)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            callers = list(self._callers.values())
            self._callers.clear()
        for caller in callers:
            caller.close("this worker is closing")
