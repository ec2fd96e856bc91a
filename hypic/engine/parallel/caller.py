"""One process's connection to one peer: asks it for entries, and hands on what comes. Two threads, both its own.

Whatever goes wrong on it ends it: the owner is told once, and makes a new one if the peer is still there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hypic.engine.parallel import wire as wires
from hypic.engine.parallel.device_memory import DeviceMemoryTransport
from hypic.engine.parallel.group import Meeting, is_available
from hypic.engine.parallel.messages import Greet, Greeted, Hello, Message, Parcel, Ready, Refused
from hypic.engine.parallel.streams import side_stream
from hypic.engine.parallel.transport import SocketTransport, Transport, choose
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost

logger = logging.getLogger("hypic")
# What is announced as larger than this is a lie.
LARGEST_BYTES = 2**40


@dataclass(frozen=True)
class Self:
    """Who calls: what it proves and says of itself; ``carrier`` is what the settings ask for; devices of one ``kind``
    are equally fast."""

    rank: int
    generation: int
    secret: bytes
    device: torch.device
    device_name: str
    carrier: str = "auto"
    device_kind: str = ""


class Events(Protocol):
    """What the owner is told, on the connection's threads; ``peer`` is rank and generation."""

    def expects(self, peer: tuple[int, int], parcel: Parcel) -> bool:
        """Whether announced entries may come now, and be as large as they say."""

    def parcel_came(self, peer: tuple[int, int], parcel: Parcel, data: Tensor, seconds: float) -> None: ...

    def refused(self, peer: tuple[int, int], message: Refused) -> None: ...

    def is_ready(self, peer: tuple[int, int], message: Ready) -> None:
        """It has an entry that waits for room."""

    def connected(self, peer: tuple[int, int], carrier: str) -> None: ...

    def lost(self, caller: Caller, reason: str) -> None: ...


class Caller:
    """See the module's docstring; ``send`` never blocks."""

    def __init__(self, me: Self, hello: Hello, events: Events) -> None:
        self.me, self.hello, self._events = me, hello, events
        self.peer = (hello.rank, hello.generation)
        self.carrier = me.carrier
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._wire: Wire | None = None
        self._transport: Transport = SocketTransport()
        self._is_over = self.is_connected = False
        self.since_s = time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=f"hypic-call-{hello.rank}", daemon=True).start()

    def send(self, message: Message) -> None:
        self._outbox.put(message)

    def close(self, reason: str = "closed") -> None:
        """End the connection and tell the owner; more calls do nothing."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._outbox.put(None)
        if self._wire is not None:
            self._wire.close()
        self._transport.close()
        self._events.lost(self, reason)

    # -- on its threads ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            wire = wires.connect(self.hello.host, self.hello.port, self.me.secret)
            self._wire = wire
            self._transport = self._greet(wire)
            self.is_connected = True
            self._events.connected(self.peer, self._transport.name)
            name = f"hypic-hear-{self.hello.rank}"
            threading.Thread(target=self._hear, args=(wire,), name=name, daemon=True).start()
            while not self._is_over and (message := self._outbox.get()) is not None:
                wire.send(message)
        except WorkerLost as error:
            self.close(str(error))
        if self._is_over and self._wire is not None:
            self._wire.close()  # it was made while the connection was being given up

    def _greet(self, wire: Wire) -> Transport:
        """Agree on how entries are carried."""
        me, hello = self.me, self.hello
        name = choose(me.carrier, me.device_name, hello.device, hello.host == wire.own_host)
        if name in ("gloo", "nccl") and not is_available(name):
            name = "socket"
        meeting = Meeting(wire.own_host) if name in ("gloo", "nccl") else None
        place = meeting.place if meeting is not None else ""
        wire.send(Greet(me.rank, me.generation, hello.rank, hello.generation, name, me.device_name, place))
        reply = wire.receive()
        if not isinstance(reply, Greeted) or reply.reason or reply.generation != hello.generation:
            said = reply.reason if isinstance(reply, Greeted) else type(reply).__name__
            raise WorkerLost(f"worker {hello.rank} will not talk ({said or 'it is another generation'}).")
        if meeting is not None and reply.transport == name:
            return meeting.join(name, me.device)
        return DeviceMemoryTransport() if reply.transport == "ipc" else SocketTransport()

    def _hear(self, wire: Wire) -> None:
        reason = "what it sent could not be taken in"
        try:
            with side_stream(self.me.device):
                while True:
                    self._take(wire, wire.receive())
        except WorkerLost as error:
            reason = str(error)
        except Exception:  # whatever it is, nobody would hear this peer any more
            logger.exception("worker %d: %s; its connection is closed", self.hello.rank, reason)
        with suppress(WorkerLost):
            self.close(reason)

    def _take(self, wire: Wire, message: Message) -> None:
        if isinstance(message, Refused):
            self._events.refused(self.peer, message)
        elif isinstance(message, Ready):
            self._events.is_ready(self.peer, message)
        elif isinstance(message, Parcel):
            is_possible = message.entries and 0 <= message.num_bytes <= LARGEST_BYTES
            if not is_possible or not self._events.expects(self.peer, message):
                raise WorkerLost(
                    f"worker {self.hello.rank} announced {len(message.entries)} entries of {message.num_bytes} bytes, "
                    "which are too large or were not called yet; it is given up."
                )
            started = time.monotonic()
            data = self._transport.receive(wire, message, self.me.device)
            self._events.parcel_came(self.peer, message, data, time.monotonic() - started)
        else:
            raise WorkerLost(f"worker {self.hello.rank} sent {type(message).__name__}, which no peer sends.")
