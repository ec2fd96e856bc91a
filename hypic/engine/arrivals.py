"""Entries that came from other workers and wait for the engine: all of them are written at once, between two steps.

Which of them are wanted, and whether they are sound, was decided before (``peers.py``). Writing takes the engine's time
by the kernel, not by the byte, so what came during a step is written with the same few kernels for all entries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hypic.engine.engine import Engine
from hypic.engine.parallel.cost import Lately
from hypic.engine.parallel.messages import Entry
from hypic.engine.parallel.streams import Made
from hypic.engine.parallel.wants import Counts, Pending
from hypic.engine.payload import note
from hypic.engine.request import Encode
from hypic.engine.store.image import EntryImage


@dataclass(frozen=True)
class Arrived:
    """An entry that was awaited, as it was checked; ``made`` is when its bytes may be read."""

    pending: Pending
    message: Entry
    image: EntryImage
    made: Made


@dataclass
class Arrivals:
    """``add`` from any thread, ``write`` on the engine's; ``receive_s`` is what an entry takes of its time: to write
    it, and while it is checked (``checking``), since what launches that keeps the engine's thread from launching.

    ``ended`` is told of nonces whose bytes are not needed any more.
    """

    counts: Counts
    ended: Callable[[Sequence[int]], None]
    writing: Lately = field(default_factory=Lately)
    checking: Lately = field(default_factory=Lately)
    _waiting: deque[Arrived] = field(default_factory=deque)

    @property
    def receive_s(self) -> float:
        return self.writing.seconds + self.checking.seconds

    @property
    def check_s(self) -> float:
        """What packing and sending takes at the other end is about what checking takes here: the same tensors."""
        return self.checking.seconds

    def add(self, arrived: Arrived) -> None:
        self._waiting.append(arrived)

    def write(self, engine: Engine) -> None:
        """All that came, into the pages and slots that wait for it, unless they wait no more."""
        self.ended(self._written(engine))

    def _written(self, engine: Engine) -> Sequence[int]:
        """The nonces of all that came."""
        began_s, written, nonces = time.monotonic(), list[tuple[Encode, EntryImage]](), list[int]()
        with suppress(IndexError):
            while True:
                arrived = self._waiting.popleft()
                nonces.append(arrived.pending.nonce)
                job = awaited(arrived.pending, engine.admission.encoding)
                if job is None:
                    self.counts.late += 1
                else:
                    written.append((job, self._taken(engine, job, arrived)))
        if written:
            self._write(engine, written, began_s)
        return nonces

    def _write(self, engine: Engine, written: Sequence[tuple[Encode, EntryImage]], began_s: float) -> None:
        engine.admission.jobs.came(written)
        self.counts.last_came_s = time.monotonic()
        self.writing.took((self.counts.last_came_s - began_s) / len(written))

    def _taken(self, engine: Engine, job: Encode, arrived: Arrived) -> EntryImage:
        arrived.made.taken()
        note(job, arrived.pending, arrived.message)
        engine.admission.expiry.end(job.entry, arrived.message.expires_s)
        self.counts.came += 1
        self.counts.fetched += arrived.message.was_held
        return arrived.image


def awaited(pending: Pending, encoding: Mapping[bytes, Encode]) -> Encode | None:
    """The encode that waits for just this, if one does."""
    job = encoding.get(pending.key)
    return job if job is not None and job.away == pending.nonce else None
