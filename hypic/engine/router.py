"""Which worker answers a request, and what becomes of it when that worker is lost. Stands where a loop stands.

This process's engine is worker 0 and always there. A request goes to the worker with the fewest requests; among equals
to the one that answered the head of this prompt before, then to the one that holds the most of its segments. When a
worker is lost, its requests go on elsewhere behind what they have generated: whoever reads an answer sees a pause.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from hypic.engine import plan
from hypic.engine.engine import Engine
from hypic.engine.loop import EngineLoop, Sink
from hypic.engine.plan import Plan
from hypic.engine.segment import Identity
from hypic.engine.task import Emission, Task
from hypic.errors import HypicError, WorkerLost

logger = logging.getLogger("hypic")
T = TypeVar("T")
# A conversation stays with its worker unless that one has so many requests more than another.
LOYALTY = 2
NUM_REMEMBERED = 10_000
# A request is tried on so many workers other than this process's before it stays here.
MOST_MOVES = 3


class Remote(Protocol):
    """The other workers, as a router needs them."""

    def able(self) -> Mapping[int, int]:
        """Generations of the workers that may be asked, by rank."""

    def held(self, rank: int, keys: list[str]) -> int:
        """How many of these entries a worker is thought to hold."""

    def ask(self, rank: int, generation: int, task: Task) -> bool:
        """Whether the request went to just this process."""

    def abort(self, rank: int, generation: int, id: str) -> None: ...


@dataclass(eq=False)
class _Routed:
    """A request that is being answered, where, and what it has generated; ``sink`` is its owner's."""

    task: Task
    sink: Sink
    rank: int
    generation: int
    digests: tuple[bytes, ...] = ()
    tokens: list[int] = field(default_factory=list)
    num_moves: int = 0


class Router:
    """See the module's docstring; has what ``EngineLoop`` has for those who ask."""

    def __init__(self, loop: EngineLoop, identity: Identity, remote: Remote) -> None:
        self.local, self._identity, self._remote = loop, identity, remote
        self._routed: dict[str, _Routed] = {}
        self._heads: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.RLock()

    # -- what a loop has ---------------------------------------------------------------------------------------------

    def submit(self, task: Task, sink: Sink) -> None:
        """Queue a request on one of the workers; ``sink`` must not block."""
        self.local.check_process()
        able = {} if task.warm or task.policy.deterministic else self._remote.able()
        if not able:
            self.local.submit(task, sink)
            return
        planned = self._planned(task)
        if task.is_head:
            self._send_head(task, sink, able, planned)
            return
        with self._lock:
            rank = self._choose(able, planned)
            digests = () if planned is None else tuple(mark.digest for mark in planned.marks)
            routed = self._routed[task.id] = _Routed(task, sink, rank, able.get(rank, 0), digests)
        self._send(routed)

    def abort(self, id: str) -> None:
        with self._lock:
            routed = self._routed.pop(id, None)
        if routed is None or routed.rank == 0:
            self.local.abort(id)
        else:
            self._remote.abort(routed.rank, routed.generation, id)

    def call(self, run: Callable[[Engine], T]) -> T:
        """On this process's engine, between two steps."""
        return self.local.call(run)

    def check_process(self) -> None:
        self.local.check_process()

    # -- what the other workers tell ---------------------------------------------------------------------------------

    def piece(self, rank: int, generation: int, emission: Emission) -> None:
        """A piece of an answer; one that is no longer expected from there is dropped."""
        with self._lock:
            routed = self._routed.get(emission.id)
        if routed is not None:
            self._deliver(routed, (rank, generation), emission)

    def left(self, rank: int, generation: int) -> None:
        """A worker is lost: its requests go on elsewhere."""
        with self._lock:
            moved = [r for r in self._routed.values() if (r.rank, r.generation) == (rank, generation)]
        for routed in moved:
            logger.warning("request %s goes on elsewhere: worker %d is lost", routed.task.id, rank)
            self._move(routed, (rank, generation))

    def num_routed(self) -> Mapping[int, int]:
        """Requests that are being answered, by rank."""
        with self._lock:
            ranks = [routed.rank for routed in self._routed.values()]
        return {rank: ranks.count(rank) for rank in sorted(set(ranks))}

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _send_head(self, task: Task, sink: Sink, able: Mapping[int, int], planned: Plan | None) -> None:
        """A snapshot is of use where the conversation will go on; whether it is ever made nobody waits to hear."""
        marks = planned.marks if planned is not None else ()
        with self._lock:  # answers that end on other threads push the oldest heads out
            known = next((self._heads[mark.digest] for mark in reversed(marks) if mark.digest in self._heads), 0)
        if known not in able or not self._remote.ask(known, able[known], task):
            self.local.submit(task, sink)

    def _planned(self, task: Task) -> Plan | None:
        """The plan of a prompt, which names its segments and its head; a prompt that has none is refused elsewhere."""
        try:
            return plan.make(task.pieces, task.policy, self._identity)
        except HypicError:
            return None

    def _choose(self, able: Mapping[int, int], planned: Plan | None) -> int:
        ranks = [routed.rank for routed in self._routed.values()]
        loads = {rank: ranks.count(rank) for rank in (0, *able)}
        least = min(loads.values())
        for mark in reversed(planned.marks if planned is not None else ()):
            known = self._heads.get(mark.digest, -1)
            if loads.get(known, least + LOYALTY + 1) <= least + LOYALTY:
                return known
        segments = () if planned is None else planned.segments
        keys = [key.hex() for segment in segments for key in segment.keys]
        equals = [rank for rank, load in loads.items() if load == least]
        return max(equals, key=lambda rank: (self._remote.held(rank, keys) if rank else 0, -rank))

    def _send(self, routed: _Routed) -> None:
        task, origin = replace(routed.task, generated=tuple(routed.tokens)), (routed.rank, routed.generation)
        if routed.rank == 0:
            self.local.submit(task, lambda emission: self._deliver(routed, origin, emission))
        elif not self._remote.ask(*origin, task):
            self._move(routed, origin)

    def _move(self, routed: _Routed, origin: tuple[int, int]) -> None:
        """To another worker that is able, or here. Nothing, if it was moved or ended meanwhile."""
        with self._lock:
            if self._routed.get(routed.task.id) is not routed or (routed.rank, routed.generation) != origin:
                return
            able = {rank: g for rank, g in self._remote.able().items() if rank != origin[0]}
            routed.num_moves += 1
            routed.rank = self._choose(able, None) if routed.num_moves <= MOST_MOVES else 0
            routed.generation = able.get(routed.rank, 0)
        try:
            self._send(routed)
        except HypicError as error:
            self._deliver(routed, (0, 0), Emission(routed.task.id, error, is_last=True))

    def _deliver(self, routed: _Routed, origin: tuple[int, int], emission: Emission) -> None:
        """To the owner, under the lock: what a worker said before it was lost comes before what the next one says."""
        if isinstance(emission.result, WorkerLost) and origin[0]:
            self._move(routed, origin)
            return
        with self._lock:
            if self._routed.get(emission.id) is not routed or (routed.rank, routed.generation) != origin:
                return
            if not isinstance(emission.result, HypicError):
                routed.tokens += emission.result.token_ids
            if emission.is_last:
                del self._routed[emission.id]
                self._remember(routed)
            routed.sink(emission)

    def _remember(self, routed: _Routed) -> None:
        for digest in routed.digests:
            self._heads.pop(digest, None)
            self._heads[digest] = routed.rank
        while len(self._heads) > NUM_REMEMBERED:
            self._heads.popitem(last=False)
