"""Where peers come to ask for entries: one listening socket, and three threads for each connection.

What is asked goes to ``Serving``; what it answers is sent (``sending.py``), but for entries for which the peer has no
room yet (``gate.py``). When a connection ends, all that was asked on it is cancelled.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from hypic.engine.parallel import wire as wires
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.device_memory import DeviceMemoryTransport
from hypic.engine.parallel.gate import Gate
from hypic.engine.parallel.group import Meeting, is_available
from hypic.engine.parallel.messages import Cancel, Go, Greet, Greeted, Ready, Want, Wants
from hypic.engine.parallel.sending import Answer, Sending
from hypic.engine.parallel.transport import SocketTransport, Transport
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost

logger = logging.getLogger("hypic")


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
    open: set[int] = field(default_factory=set)
    gate: Gate[Answer] = field(default_factory=Gate)
    sending: Sending | None = None
    is_over: bool = False

    def run(self) -> None:
        self.sending = Sending(str(self.number), self.wire, self._greeted(), self.me.device)
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
        if self.sending is not None:
            self.sending.transport.close()
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
        assert self.sending is not None, "what was asked came after the greeting"
        self.sending.put(answer)
        if self.is_over:
            self._empty()

    def _empty(self) -> None:
        """Nothing is sent any more; whoever sends is woken."""
        for held in self.gate.open_all():
            held.drop()
        if self.sending is not None:
            self.sending.end()

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


def _can(name: str) -> bool:
    return name in ("socket", "ipc") or (name in ("gloo", "nccl") and is_available(name))
