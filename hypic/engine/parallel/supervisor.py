"""Keeps workers alive: starts them, hears their heartbeats, ends what hangs, starts again what is gone.

Every start of a rank has a new *generation*, and nothing that an older one says is listened to. A worker is lost when
its process ends, its connection breaks, it is silent for too long, or it fails again and again; then it is killed, and
started again after a pause that grows. Closing leaves no process.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hypic.engine.parallel import wire as wires
from hypic.engine.parallel.liveness import Times, longest_s
from hypic.engine.parallel.messages import Beat, Failed, Hello, Message, Stop
from hypic.engine.parallel.processes import LocalProcess, Process
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost

logger = logging.getLogger("hypic")
Launch = Callable[[Mapping[str, Any]], Process]


class Events(Protocol):
    """What the owner is told, on the supervisor's threads."""

    def came(self, hello: Hello) -> None: ...

    def heard(self, hello: Hello, message: Message) -> None:
        """Raises ``WorkerLost`` for what no worker says."""

    def left(self, rank: int, generation: int, reason: str) -> None: ...


@dataclass
class _Place:
    """One rank: the process that holds it, or when the next one will be started."""

    rank: int
    generation: int = 0
    process: Process | None = None
    wire: Wire | None = None
    hello: Hello | None = None
    started_s: float = 0.0
    heard_s: float = 0.0
    next_start_s: float = 0.0
    num_failures: int = 0
    failure: str = ""
    busy_s: float = 0.0
    longest_s: float = 0.0


class Supervisor:
    """See the module's docstring. ``specs`` are what each rank's worker is told beside who and where it is."""

    def __init__(
        self,
        specs: Mapping[int, Mapping[str, Any]],
        events: Events,
        times: Times = Times(),
        launch: Launch = LocalProcess,
        host: str = "127.0.0.1",
    ) -> None:
        self.secret, self.times, self.host = secrets.token_bytes(32), times, host
        self.specs, self._events, self._launch = specs, events, launch
        self._places = {rank: _Place(rank) for rank in specs}
        self._lock = threading.RLock()
        self._over, self._ended = threading.Event(), threading.Event()
        self._changed = threading.Condition(self._lock)
        self._socket = wires.listen(host)
        self._old: list[Process] = []
        for run in (self._accept, self._watch):
            threading.Thread(target=run, name="hypic-supervisor", daemon=True).start()

    # -- for the owner -----------------------------------------------------------------------------------------------

    @property
    def hellos(self) -> list[Hello]:
        """Of all that are ready."""
        with self._lock:
            return [place.hello for place in self._places.values() if place.hello is not None]

    def wait_ready(self) -> None:
        """Until every worker is ready.

        Raises:
            WorkerLost: one cannot start, with its reason.
        """
        deadline_s = time.monotonic() + self.times.start_s
        with self._changed:
            while not all(place.hello for place in self._places.values()):
                hopeless = [place for place in self._places.values() if place.num_failures >= self.times.failures]
                if hopeless or time.monotonic() > deadline_s:
                    failed = (hopeless or [place for place in self._places.values() if place.hello is None])[0]
                    why = failed.failure or "it takes too long"
                    raise WorkerLost(f"worker {failed.rank} cannot start: {why}; lower workers= or see the log.")
                self._changed.wait(0.1)

    def send(self, rank: int, generation: int, message: Message) -> bool:
        """Whether the message went to just this process."""
        with self._lock:
            place = self._places[rank]
            wire = place.wire if place.generation == generation else None
        try:
            if wire is not None:
                wire.send(message)
        except WorkerLost as error:
            self.lose(rank, generation, str(error))
            return False
        return wire is not None

    def lose(self, rank: int, generation: int, reason: str) -> None:
        """A worker is of no use any more: kill it and start it again later. Of an older generation: nothing."""
        with self._changed:
            place = self._places[rank]
            if place.generation != generation or place.process is None:
                return
            self._end(place, reason)
            was_ready, place.hello = place.hello is not None, None
            self._changed.notify_all()
        logger.warning("worker %d (generation %d) is lost: %s", rank, generation, reason)
        if was_ready:
            self._events.left(rank, generation, reason)

    def close(self) -> None:
        """Ask all to stop, end those that do not, and wait until no process is left."""
        self._over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            wires_left = [place.wire for place in self._places.values() if place.wire is not None]
            processes = [place.process for place in self._places.values() if place.process is not None] + self._old
        for wire in wires_left:
            with suppress(WorkerLost):
                wire.send(Stop())
        deadline_s = time.monotonic() + self.times.stop_s
        for process in processes:
            if not process.wait(max(deadline_s - time.monotonic(), 0.01)):
                process.kill()
                process.wait(self.times.stop_s)
        for wire in wires_left:
            wire.close()
        self._ended.set()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(self.times.tick_s):
            now = time.monotonic()
            for place in self._places.values():
                reason = self._fault(place, now)
                if reason:
                    self.lose(place.rank, place.generation, reason)
                elif place.process is None and now >= place.next_start_s:
                    self._start(place)
            self._old = [process for process in self._old if not process.wait(0)]
        self._ended.wait()  # processes end with the thread that started them, and closing lets them end by themselves

    def _fault(self, place: _Place, now: float) -> str:
        if place.process is None:
            return ""
        if not place.process.is_alive:
            return place.failure or "its process ended"
        if place.hello is None:
            return "it takes too long to start" if now - place.started_s > self.times.start_s else ""
        if now - place.started_s > self.times.forget_s:
            place.num_failures = 0
        return self.times.fault(now - place.heard_s, place.busy_s, place.longest_s)

    def _start(self, place: _Place) -> None:
        with self._lock:
            if self._over.is_set():
                return
            place.generation, place.started_s, place.failure = place.generation + 1, time.monotonic(), ""
            port = int(self._socket.getsockname()[1])
            told = {
                **self.specs[place.rank],
                **{"rank": place.rank, "generation": place.generation, "secret": self.secret.hex()},
                **{"front": [self.host, port], "beat_s": self.times.beat_s},
            }
            try:
                place.process = self._launch(told)
            except WorkerLost as error:
                place.failure, place.num_failures = str(error), place.num_failures + 1
                place.next_start_s = time.monotonic() + self._pause_s(place)

    def _end(self, place: _Place, reason: str) -> None:
        assert place.process is not None, "a place without a process has nothing to end"
        place.process.kill()
        self._old.append(place.process)
        if place.wire is not None:
            place.wire.close()
        place.process = place.wire = None
        place.failure, place.num_failures = reason, place.num_failures + 1
        place.next_start_s = time.monotonic() + self._pause_s(place)

    def _pause_s(self, place: _Place) -> float:
        pause_s = self.times.pause_s * 2.0 ** min(place.num_failures - 1, 20)
        return min(pause_s, self.times.longest_pause_s)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection,), name="hypic-front", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with suppress(WorkerLost):
            wire = wires.accepted(connection, self.secret)
            try:
                first = wire.receive()
                if isinstance(first, Failed):
                    self._failed(first)
                elif isinstance(first, Hello) and self._welcome(first, wire):
                    self._listen(first, wire)
            finally:
                wire.close()

    def _failed(self, message: Failed) -> None:
        with self._changed:
            place = self._places.get(message.rank)
            if place is not None and place.generation == message.generation:
                place.failure = message.reason
                self._changed.notify_all()

    def _welcome(self, hello: Hello, wire: Wire) -> bool:
        """Whether this is the process that was started last for its rank."""
        with self._changed:
            place = self._places.get(hello.rank)
            if place is None or place.generation != hello.generation or place.process is None or place.wire is not None:
                return False
            place.wire, place.hello, place.heard_s, place.busy_s = wire, hello, time.monotonic(), 0.0
            self._changed.notify_all()
        self._events.came(hello)
        return True

    def _listen(self, hello: Hello, wire: Wire) -> None:
        try:
            while True:
                self._take(hello, wire.receive())
        except WorkerLost as error:
            if not self._over.is_set():
                self.lose(hello.rank, hello.generation, str(error))

    def _take(self, hello: Hello, message: Message) -> None:
        with self._lock:
            place = self._places[hello.rank]
            if place.generation != hello.generation:
                raise WorkerLost(f"generation {hello.generation} of worker {hello.rank} is over.")
            place.heard_s = time.monotonic()
            if isinstance(message, Beat):
                place.busy_s, place.longest_s = message.busy_s, longest_s(hello, message)
        if isinstance(message, Beat) and (message.rank, message.generation) != (hello.rank, hello.generation):
            raise WorkerLost(f"worker {hello.rank} speaks for another.")
        self._events.heard(hello, message)
