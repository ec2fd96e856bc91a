"""One connection between two processes that know one secret: frames of JSON, and bytes behind those that announce it.

Both sides prove the secret before anything else is read (HMAC-SHA256 over fresh random numbers). A frame is its length
and one message. Sending is safe from any thread; one thread receives. A connection that breaks in any way is
``WorkerLost`` from then on, and closing it wakes whoever reads.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hypic.engine.parallel import codec
from hypic.engine.parallel.messages import Message
from hypic.errors import WorkerLost

_LENGTH = struct.Struct("<Q")
_NONCE_BYTES = 32
HANDSHAKE_S = 10.0
# A peer that takes nothing for so long is as good as dead, and its connection is closed.
SEND_S = 30.0


class Wire:
    """A connection after its handshake; see the module's docstring."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock, self._closed = connection, threading.Lock(), False
        with suppress(OSError):  # no such option on this kind of socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        # Only sending is limited in time: a reader waits for as long as the other side has nothing to say.
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))

    @property
    def host(self) -> str:
        """The other side's address."""
        return str(self._socket.getpeername()[0])

    @property
    def own_host(self) -> str:
        """The address by which the other side knows this one."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message, data: Tensor | None = None) -> None:
        """One message, and the bytes it announces: ``[n]`` of uint8 on the host.

        Raises:
            WorkerLost: the connection is gone, or the other side takes nothing.
        """
        self._send(_frame(message), data)

    def send_together(self, messages: Sequence[Message]) -> None:
        """Several, with no other between them.

        Raises:
            WorkerLost: the connection is gone, or the other side takes nothing.
        """
        self._send(b"".join(map(_frame, messages)))

    def _send(self, frames: bytes, data: Tensor | None = None) -> None:
        try:
            with self._lock:
                self._socket.sendall(frames)
                if data is not None:
                    self._socket.sendall(_view(data))
        except OSError as error:
            self.close()
            raise WorkerLost(f"a worker cannot be reached ({error}).") from error

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            WorkerLost: the connection is gone, or what came is no message.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > codec.LONGEST_BYTES:
            self.close()
            raise WorkerLost(f"a worker announced a message of {length} bytes; it is given up.")
        return codec.decode(bytes(self._exactly(length)))

    def receive_bytes(self, num_bytes: int) -> Tensor:
        """``[num_bytes]`` of uint8 that the last message announced.

        Raises:
            WorkerLost: the connection is gone.
        """
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._fill(_view(buffer))
        return buffer

    def close(self) -> None:
        """Whoever reads or writes is woken; more calls do nothing."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _exactly(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except (OSError, ValueError) as error:
                raise WorkerLost(f"a worker cannot be heard ({error}).") from error
            if count == 0:
                raise WorkerLost("a worker has closed its connection.")
            view = view[count:]


def _frame(message: Message) -> bytes:
    body = codec.encode(message)
    assert len(body) <= codec.LONGEST_BYTES, f"a message of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


def _view(data: Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]


def connect(host: str, port: int, secret: bytes) -> Wire:
    """A connection to whoever listens there.

    Raises:
        WorkerLost: nobody does, or it does not know the secret.
    """
    try:
        connection = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    except OSError as error:
        raise WorkerLost(f"no worker answers at {host}:{port} ({error}).") from error
    return _shake(connection, secret, is_server=False)


def accepted(connection: socket.socket, secret: bytes) -> Wire:
    """The other end of ``connect``.

    Raises:
        WorkerLost: the caller does not know the secret.
    """
    connection.settimeout(HANDSHAKE_S)
    return _shake(connection, secret, is_server=True)


def _shake(connection: socket.socket, secret: bytes, is_server: bool) -> Wire:
    """Each side sends a number and proves the secret over both; the client first, so that a stranger learns nothing."""
    try:
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine)
        theirs = _read(connection, _NONCE_BYTES)
        numbers = theirs + mine if is_server else mine + theirs
        client, server = (hmac.digest(secret, side + numbers, "sha256") for side in (b"client", b"server"))
        if not is_server:
            connection.sendall(client)
        sound = hmac.compare_digest(_read(connection, len(client)), client if is_server else server)
        if is_server and sound:
            connection.sendall(server)
    except OSError as error:
        connection.close()
        raise WorkerLost(f"a worker broke off before it said who it is ({error}).") from error
    if not sound:
        connection.close()
        raise WorkerLost("somebody called who does not know the workers' secret; the connection was closed.")
    return Wire(connection)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data


def listen(host: str) -> socket.socket:
    """A listening socket at a free port."""
    return socket.create_server((host, 0), backlog=128)
