"""What leaves on a connection: word of entries as it comes, and the entries themselves in parcels, by two threads.

One thread packs what is there, the other sends what is packed, so the next parcel is packed while one is on its way. No
more than two of them exist at once, which is memory beside the pool. What has come meanwhile goes into one parcel, as
far as that is not too large: what handling entries costs is made once for all of them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hypic.engine.free_memory import attempted
from hypic.engine.parallel.cost import PARCEL_BYTES
from hypic.engine.parallel.messages import Entry, Parcel, Ready, Refused
from hypic.engine.parallel.streams import side_stream
from hypic.engine.parallel.transport import Transport
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost

logger = logging.getLogger("hypic")
NUM_PARCELS = 2
# What handling a parcel costs is launches, whatever it holds; on a large GPU it may hold this share of the memory.
PARCEL_SHARE = 1 / 128


@dataclass(frozen=True)
class Packed:
    """Entries' bytes ``[n]`` of uint8, their digest, and of which transitions they are (``Parcel.num_kept``)."""

    num_kept: tuple[int, ...]
    data: Tensor
    digest: int


class Lease(Protocol):
    """An entry that lies where it is until it was sent."""

    @property
    def num_bytes(self) -> int:
        """What it takes about."""

    def packed_with(self, others: Sequence[Any]) -> Packed:
        """This entry and others of the same lender, in this order, copied in the current stream."""

    def end(self) -> None:
        """It is not needed any more, and nothing reads it; more calls do nothing. From any thread."""


@dataclass(frozen=True)
class Answer:
    """What comes of a ``Want``: an entry, which is packed and summed up when it is sent; a refusal; or word of an entry
    that waits for room."""

    message: Entry | Refused | Ready
    lease: Lease | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.lease is None else self.lease.num_bytes

    def drop(self) -> None:
        """Nobody waits for it."""
        if self.lease is not None:
            self.lease.end()


def most_parcel_bytes(device: torch.device) -> int:
    """What entries that travel together may take; one that is larger travels alone."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(PARCEL_BYTES, int(PARCEL_SHARE * total))


def parcel_of(answers: Sequence[Answer]) -> tuple[Parcel, Tensor]:
    """The message for several entries and their bytes, in the current stream; the entries are free when this returns.

    Raises:
        OutOfMemoryError: there is no memory for so many; none is free.
    """
    began_s = time.thread_time()
    leases = [answer.lease for answer in answers if answer.lease is not None]
    entries = tuple(answer.message for answer in answers if isinstance(answer.message, Entry))
    assert leases and len(leases) == len(entries) == len(answers), "only entries are packed"
    packed = leases[0].packed_with(leases[1:])
    for lease in leases:
        lease.end()
    took_s = time.thread_time() - began_s
    return Parcel(entries, packed.num_kept, len(packed.data), packed.digest, took_s), packed.data


class Sending:
    """Ends when its connection does, or with ``end``. ``put`` is safe from any thread."""

    def __init__(self, name: str, wire: Wire, transport: Transport, device: torch.device) -> None:
        self.wire, self.transport, self._device = wire, transport, device
        self._outbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._left: deque[Answer | None] = deque()
        self._packed: queue.SimpleQueue[tuple[Parcel, Tensor] | None] = queue.SimpleQueue()
        self._most_bytes = most_parcel_bytes(device)
        self._places = threading.Semaphore(NUM_PARCELS)
        for what, run in (("pack", self._pack_all), ("send", self._send_all)):
            threading.Thread(target=run, name=f"hypic-{what}-{name}", daemon=True).start()

    def put(self, answer: Answer) -> None:
        self._outbox.put(answer)

    def end(self) -> None:
        """Nothing more is sent: what waits is dropped, and the threads end."""
        with suppress(queue.Empty):
            while True:
                answer = self._outbox.get_nowait()
                if answer is not None:
                    answer.drop()
        self._outbox.put(None)

    # -- on the thread that packs ------------------------------------------------------------------------------------

    def _pack_all(self) -> None:
        with side_stream(self._device):
            try:
                while (answer := self._next()) is not None:
                    if answer.lease is None:
                        self._send_one(answer)
                    else:
                        self._pack(answer)
            except (WorkerLost, RuntimeError) as error:  # the latter of torch
                logger.info("a peer cannot be served: %s", error)
            finally:
                self.wire.close()
                self._packed.put(None)
                self._drop_left()

    def _pack(self, first: Answer) -> None:
        self._places.acquire()  # what comes while both are on their way goes together
        answers = [first]
        try:
            answers += self._more(first.num_bytes)
            if len(answers) > 1 and isinstance(first.message, Entry):  # its step is over: that is known before it comes
                self.wire.send(Ready(first.message.nonce, first.message.generation))
            packed = self._packed_of(answers)
            answers = []
        finally:
            for answer in answers:
                answer.drop()
        self._packed.put(packed)

    def _packed_of(self, answers: list[Answer]) -> tuple[Parcel, Tensor]:
        """A parcel; where there is no memory for so many, of the first, and of one from then on."""
        if len(answers) == 1:
            return parcel_of(answers)
        packed = attempted(partial(parcel_of, answers), self._device, "packing entries")
        if packed is not None:
            return packed
        self._most_bytes = 0
        self._left.extendleft(reversed(answers[1:]))
        del answers[1:]
        return parcel_of(answers)

    def _next(self) -> Answer | None:
        return self._left.popleft() if self._left else self._outbox.get()

    def _more(self, num_bytes: int) -> Iterator[Answer]:
        """Entries that are there already, as many as go into a parcel with so many bytes; what is no entry is sent."""
        with suppress(queue.Empty):
            while True:
                answer = self._left.popleft() if self._left else self._outbox.get_nowait()
                num_bytes += 0 if answer is None else answer.num_bytes
                if answer is None or num_bytes > self._most_bytes:
                    self._left.appendleft(answer)
                    return
                if answer.lease is None:
                    self._send_one(answer)
                else:
                    yield answer

    def _drop_left(self) -> None:
        for answer in self._left:
            if answer is not None:
                answer.drop()

    def _send_one(self, answer: Answer) -> None:
        self.wire.send(answer.message)

    # -- on the thread that sends ------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        with side_stream(self._device):
            while (packed := self._packed.get()) is not None:
                try:
                    self._send_parcel(*packed)
                except (WorkerLost, RuntimeError) as error:  # so does what follows, until the other thread has seen it
                    logger.info("a peer cannot be served: %s", error)
                    self.wire.close()
                finally:
                    packed = None  # its memory is free when another may take its place
                    self._places.release()

    def _send_parcel(self, parcel: Parcel, data: Tensor) -> None:
        self.transport.send(self.wire, parcel, data)
