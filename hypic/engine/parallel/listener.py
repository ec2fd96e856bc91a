"""Where peers come to ask for entries: one listening socket, and two threads for each connection.

What is asked goes to ``Serving``; what it answers is queued and sent in order, but for entries for which the peer has
no room yet (``gate.py``). When a connection ends, all that was asked on it is cancelled.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from hypic.engine.parallel import wire as wires
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.device_memory import DeviceMemoryTransport
from hypic.engine.parallel.gate import Gate
from hypic.engine.parallel.group import Meeting, is_available
from hypic.engine.parallel.messages import Cancel, Entry, Go, Greet, Greeted, Ready, Refused, Want, Wants
from hypic.engine.parallel.packing import Spec, digest, written
from hypic.engine.parallel.streams import side_stream
from hypic.engine.parallel.transport import SocketTransport, Transport
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost

logger = logging.getLogger("hypic")


class Lease(Protocol):
    """An entry that lies where it is until it was sent."""

    def packed(self) -> tuple[tuple[Spec, ...], Tensor]:
        """Its tensors, copied in the current stream: what they are, and ``[n]`` of uint8."""

    def end(self) -> None:
        """It is not needed any more, and nothing reads it; more calls do nothing. From any thread."""


@dataclass(frozen=True)
class Answer:
    """What comes of a ``Want``: an entry, which is packed and summed up when it is sent; a refusal; or word of an entry
    that waits for room."""

    message: Entry | Refused | Ready
    lease: Lease | None = None

    def drop(self) -> None:
        """Nobody waits for it."""
        if self.lease is not None:
            self.lease.end()

    def entry(self) -> tuple[Entry, Tensor]:
        """The whole message and its bytes, in the current stream; the entry is free when this returns."""
        assert self.lease is not None and isinstance(self.message, Entry), "only an entry is packed"
        try:
            specs, data = self.lease.packed()
            return replace(self.message, tensors=written(specs), num_bytes=len(data), digest=digest(data)), data
        finally:
            self.lease.end()


@dataclass(frozen=True)
class Asked:
    """A ``Want`` as it came: ``ask`` is the connection's own name for it; ``reply`` is called once, from any thread,
    unless it is cancelled."""

    ask: tuple[int, int]
    want: Want
    reply: Callable[[Answer], None]


class Serving(Protocol):
    """Makes entries."""

    def want(self, asked: Sequence[Asked]) -> None:
        """What was asked at once is made together."""

    def cancel(self, ask: tuple[int, int]) -> None: ...


class Listener:
    """Listens from the start; ``close`` ends all connections."""

    def __init__(self, me: Self, host: str, serving: Serving) -> None:
        self._me, self._serving = me, serving
        self._socket = wires.listen(host)
        self._sessions: set[_Session] = set()
        self._is_over = False
        self._number = 0
        threading.Thread(target=self._accept, name="hypic-accept", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for session in list(self._sessions):
            session.close()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._number += 1
            threading.Thread(target=self._serve, args=(connection, self._number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            session = _Session(number, wires.accepted(connection, self._me.secret), self._serving, self._me)
        except WorkerLost as error:
            logger.warning("%s", error)
            return
        self._sessions.add(session)
        try:
            session.run()
        except WorkerLost as error:
            logger.info("a peer's connection ended: %s", error)
        finally:
            self._sessions.discard(session)
            session.close()


@dataclass(eq=False)
class _Session:
    """One peer's connection."""

    number: int
    wire: Wire
    serving: Serving
    me: Self
    outbox: queue.SimpleQueue[Answer | None] = field(default_factory=queue.SimpleQueue)
    transport: Transport = field(default_factory=SocketTransport)
    open: set[int] = field(default_factory=set)
    gate: Gate[Answer] = field(default_factory=Gate)
    is_over: bool = False

    def run(self) -> None:
        self.transport = self._greeted()
        threading.Thread(target=self._send, name=f"hypic-send-{self.number}", daemon=True).start()
        while True:
            message = self.wire.receive()
            if isinstance(message, Wants):
                self.serving.want([self._asked(want) for want in message.items])
            elif isinstance(message, Go):
                for nonce in message.nonces:
                    self._send_held(nonce)
            elif isinstance(message, Cancel):
                self._cancel(message.nonce)
            else:
                raise WorkerLost(f"a peer sent {type(message).__name__}, which no peer asks.")

    def close(self) -> None:
        self.is_over = True
        self.wire.close()
        self.transport.close()
        for nonce in list(self.open):
            self._cancel(nonce)
        self._empty()

    def _cancel(self, nonce: int) -> None:
        self.open.discard(nonce)
        self.serving.cancel((self.number, nonce))
        held = self.gate.open(nonce)
        if held is not None:
            held.drop()

    def _send_held(self, nonce: int) -> None:
        """There is room for it now."""
        held = self.gate.open(nonce)
        if held is not None:
            self._put(held)

    def _asked(self, want: Want) -> Asked:
        self.open.add(want.nonce)
        if want.waits:
            self.gate.shut(want.nonce)

        def reply(answer: Answer) -> None:
            if want.nonce not in self.open:
                answer.drop()
                return
            self.open.discard(want.nonce)
            if answer.lease is None:
                self.gate.open(want.nonce)  # a refusal needs no room
            is_held = self.gate.holds(want.nonce, answer)
            self._put(Answer(Ready(want.nonce, want.generation)) if is_held else answer)

        return Asked((self.number, want.nonce), want, reply)

    def _put(self, answer: Answer) -> None:
        self.outbox.put(answer)
        if self.is_over:
            self._empty()

    def _empty(self) -> None:
        """Nothing is sent any more; whoever sends is woken."""
        for held in self.gate.open_all():
            held.drop()
        with suppress(queue.Empty):
            while True:
                answer = self.outbox.get_nowait()
                if answer is not None:
                    answer.drop()
        self.outbox.put(None)

    def _greeted(self) -> Transport:
        greet, me = self.wire.receive(), self.me
        if not isinstance(greet, Greet):
            raise WorkerLost(f"a peer began with {type(greet).__name__}.")
        if (greet.to_rank, greet.to_generation) != (me.rank, me.generation):
            reason = f"worker {me.rank} is in generation {me.generation}"
            self.wire.send(Greeted(me.generation, "", reason))
            raise WorkerLost(reason)
        name = greet.transport if _can(greet.transport) else "socket"
        meeting = Meeting(self.wire.own_host, greet.meeting) if name in ("gloo", "nccl") else None
        self.wire.send(Greeted(me.generation, name))
        if meeting is not None:
            return meeting.join(name, me.device)
        return DeviceMemoryTransport() if name == "ipc" else SocketTransport()

    def _send(self) -> None:
        with side_stream(self.me.device):
            try:
                while (answer := self.outbox.get()) is not None:
                    self._send_one(answer)
            except WorkerLost as error:
                logger.info("a peer cannot be served: %s", error)
            finally:
                self.wire.close()

    def _send_one(self, answer: Answer) -> None:
        if answer.lease is None:
            self.wire.send(answer.message)
        else:
            self.transport.send(self.wire, *answer.entry())


def _can(name: str) -> bool:
    return name in ("socket", "ipc") or (name in ("gloo", "nccl") and is_available(name))
