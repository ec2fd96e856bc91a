"""Entries that came from other workers and wait for the engine: all of them are written at once, between two steps.

Which of them are wanted, and whether they are sound, was decided before (``peers.py``). Writing takes the engine's time
by the kernel, not by the byte, so what came together is written with the same few kernels (``parcel.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hypic.engine.encode import Encode
from hypic.engine.engine import Engine
from hypic.engine.free_memory import attempted
from hypic.engine.parallel.cost import Lately
from hypic.engine.parallel.messages import Entry
from hypic.engine.parallel.streams import Made
from hypic.engine.parallel.wants import Counts, Pending
from hypic.engine.parcel import Opened, write
from hypic.engine.payload import note
from hypic.engine.pool import Pool
from hypic.engine.segment import CachedSegment


@dataclass(frozen=True)
class Arrived:
    """A parcel as it was checked: what was awaited of it, each with its place in it; ``made`` is when its bytes may be
    read."""

    awaited: tuple[tuple[int, Pending, Entry], ...]
    content: Opened
    made: Made


@dataclass
class Arrivals:
    """``add`` from any thread, ``write`` on the engine's; ``receive_s`` is what an entry takes of its time: to write
    it, and while it is checked (``checking``), since what launches that keeps the engine's thread from launching;
    ``send_s`` what it takes of the sender's (``packing``).

    ``ended`` is told of nonces whose bytes are not needed any more.
    """

    counts: Counts
    ended: Callable[[Sequence[int]], None]
    writing: Lately = field(default_factory=Lately)
    checking: Lately = field(default_factory=Lately)
    packing: Lately = field(default_factory=Lately)
    _waiting: deque[Arrived] = field(default_factory=deque)

    @property
    def receive_s(self) -> float:
        return self.writing.seconds + self.checking.seconds

    @property
    def send_s(self) -> float:
        return self.packing.seconds

    def handled(self, num_entries: int, check_s: float, pack_s: float) -> None:
        """What a parcel has taken of this process's time, and of that of who sent it."""
        self.counts.check_s += check_s
        self.counts.pack_s += pack_s
        self.counts.handled += num_entries
        self.counts.parcels += 1
        self.checking.took(check_s / num_entries)
        self.packing.took(pack_s / num_entries)

    def add(self, arrived: Arrived) -> None:
        self._waiting.append(arrived)

    def write(self, engine: Engine) -> None:
        """All that came, into the pages and slots that wait for it, unless they wait no more."""
        nonces = list[int]()
        try:
            while self._waiting:
                arrived = self._waiting.popleft()
                nonces += [pending.nonce for _, pending, _ in arrived.awaited]
                self._take_in(engine, arrived)
        finally:
            self.ended(nonces)

    def _take_in(self, engine: Engine, arrived: Arrived) -> None:
        began_s, encoding = time.monotonic(), engine.admission.encoding
        found = [(number, awaited(pending, encoding), pending, entry) for number, pending, entry in arrived.awaited]
        wanted = [(number, job, pending, entry) for number, job, pending, entry in found if job is not None]
        self.counts.late += len(found) - len(wanted)
        arrived.made.taken()
        if not wanted:
            return
        jobs = [job for _, job, _, _ in wanted]
        if not self._is_written(engine, arrived, [(number, job) for number, job, _, _ in wanted]):
            self._encode_here(jobs)
            return
        for _, job, pending, entry in wanted:
            self._note(engine, job, pending, entry)
        engine.admission.jobs.came(jobs)
        self.counts.last_came_s = time.monotonic()
        self.counts.write_s += self.counts.last_came_s - began_s
        self.writing.took((self.counts.last_came_s - began_s) / len(jobs))

    @staticmethod
    def _is_written(engine: Engine, arrived: Arrived, wanted: Sequence[tuple[int, Encode]]) -> bool:
        """Whether there was memory for what is needed to write them."""
        pool = engine.runner.pool
        places = [(number, job.entry) for number, job in wanted]
        return attempted(partial(_written, pool, arrived.content, places), pool.device, "writing what came") is True

    def _encode_here(self, jobs: Sequence[Encode]) -> None:
        """Nobody is asked for them any more, so nobody else would see that they do not come."""
        for job in jobs:
            job.away = 0
        self.counts.fell_back += len(jobs)

    def _note(self, engine: Engine, job: Encode, pending: Pending, message: Entry) -> None:
        note(job, pending, message)
        engine.admission.expiry.end(job.entry, message.expires_s)
        self.counts.came += 1
        self.counts.fetched += message.was_held


def _written(pool: Pool, content: Opened, places: Sequence[tuple[int, CachedSegment]]) -> bool:
    write(pool, content, places)
    return True


def awaited(pending: Pending, encoding: Mapping[bytes, Encode]) -> Encode | None:
    """The encode that waits for just this, if one does."""
    job = encoding.get(pending.key)
    return job if job is not None and job.away == pending.nonce else None
