"""One cold request played step by step, with costs that are believed and costs that are true: what a wrong plan takes.

Workers run steps of ``batch_tokens``, what a step makes leaves when it ends, one parcel after the other, of which word
goes ahead, and between its steps the combiner does what it does in earnest (``stealing.py``): when it is idle it takes
back what a peer cannot have begun by what has come of it, and when a peer is idle, it plans anew what waits. A step
that runs is not ended: what changes hands and was begun all the same is made twice. No model runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypic.engine.parallel.assign import PLANNERS, Job, Member, Planner, alike
from hypic.engine.parallel.cost import NO_LINK, PARCEL_BYTES
from hypic.engine.parallel.progress import Progress, num_begun
from hypic.engine.parallel.stealing import num_to_take, owed


@dataclass
class _Worker:
    """``member`` is what is believed and ``truth`` what is; what waits, what its step holds, what the combiner knows of
    it, what handling entries has taken of its next step, and when its link is free."""

    member: Member
    truth: Member
    queue: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    owes_s: float = 0.0
    link_s: float = 0.0

    def give(self, job: Job, now: float) -> None:
        self.queue.append(job)
        self.progress.asked(job.number, job.num_tokens, now)

    def start(self, now: float) -> float | None:
        """When the step ends that begins now, if one does."""
        if self.running or not self.queue:
            return None
        count = num_begun(_tokens(self.queue), self.truth.encode.batch_tokens)
        self.running, self.queue = self.queue[:count], self.queue[count:]
        took_s, self.owes_s = self.truth.encode.together_s(_tokens(self.running)) + self.owes_s, 0.0
        return now + took_s

    def finish(self, now: float) -> list[tuple[float, Job]]:
        """What was made in the step that ends now, and when it is at the combiner."""
        found = list[tuple[float, Job]]()
        for parcel in _parcels(self.running):
            self.link_s = max(now, self.link_s) + sum(self.truth.link.seconds(job.num_bytes) for job in parcel)
            found += [(self.link_s, job) for job in parcel]
        self.owes_s += self.truth.send_s * len(self.running)
        self.running = []
        return found


def _parcels(jobs: Sequence[Job]) -> list[list[Job]]:
    """What of a step travels together (``sending.py``), between devices that are not large."""
    found = list[list[Job]]()
    for job in jobs:
        if found and sum(one.num_bytes for one in found[-1]) + job.num_bytes <= PARCEL_BYTES:
            found[-1].append(job)
        else:
            found.append([job])
    return found


@dataclass
class Cold:
    """A request in the making; the first worker combines. ``num_moved`` segments changed hands; ``num_twice`` of them
    were made by both."""

    workers: list[_Worker]
    planner: Planner
    steals: bool
    num_moved: int = 0
    num_twice: int = 0
    seconds: float = 0.0
    _events: list[tuple[float, int, int, Job | None]] = field(default_factory=list)
    _missing: set[int] = field(default_factory=set)

    def run(self, jobs: Sequence[Job]) -> Cold:
        """Until the last entry is there and its receipt is over: ``seconds``."""
        own, now = self.workers[0], 0.0
        self._missing = {job.number for job in jobs}
        self._plan(jobs, self.workers, now)
        while self._missing:
            self._start(now)
            now, number, _, job = heapq.heappop(self._events)
            if job is None:
                self._ends(number, now)
            elif job.number in self._missing:
                self._comes(number, job, now)
            if self.steals and not own.running:
                self._rebalance(now)
        self.seconds = now if own.running else now + own.owes_s
        return self

    def _start(self, now: float) -> None:
        for number, worker in enumerate(self.workers):
            end_s = worker.start(now)
            if end_s is not None:
                self._put(end_s, number, None)

    def _put(self, when_s: float, number: int, job: Job | None) -> None:
        heapq.heappush(self._events, (when_s, number, -1 if job is None else job.number, job))

    def _ends(self, number: int, now: float) -> None:
        worker = self.workers[number]
        for job in worker.running[:1]:  # word of it comes before it does
            worker.progress.made(job.number, now, worker.member.encode.batch_tokens)
        for arrival_s, job in worker.finish(now):
            self._put(arrival_s, number, job)

    def _comes(self, number: int, job: Job, now: float) -> None:
        self._missing.discard(job.number)
        if number:
            own, worker = self.workers[0], self.workers[number]
            own.owes_s += own.truth.receive_s
            made_s = now - worker.truth.link.seconds(job.num_bytes)
            worker.progress.came(job.number, made_s, worker.member.encode.batch_tokens)

    def _plan(self, jobs: Sequence[Job], workers: Sequence[_Worker], now: float) -> None:
        members = alike([worker.member for worker in workers])
        by_rank = {worker.member.rank: worker for worker in workers}
        for place in self.planner(jobs, members, self.workers[0].member.rank):
            by_rank[place.rank].give(place.job, now)

    def _rebalance(self, now: float) -> None:
        own, *others = self.workers
        first = num_begun(_tokens(own.queue), own.truth.encode.batch_tokens)
        idle = [worker for worker in others if not (worker.progress.making or worker.progress.leaving)]
        if own.queue[first:] and idle:
            # What the next step here holds is counted by the planner as work of this plan, and stays.
            later, own.queue = own.queue[first:], own.queue[:first]
            before = len(own.queue)
            self._plan(later, [self._queued(own), *idle], now)
            self.num_moved += len(later) - (len(own.queue) - before)
        elif not own.queue:
            self._take_back(own, others, now)

    def _queued(self, own: _Worker) -> _Worker:
        queued_s = own.member.encode.together_s(_tokens(own.queue))
        return replace(own, member=replace(own.member, queued_s=queued_s))

    def _take_back(self, own: _Worker, others: Sequence[_Worker], now: float) -> None:
        for number, worker in enumerate(others, 1):
            worker.progress.keep(self._missing)
            mine, theirs = alike([own.member, worker.member])
            bytes_ = max((job.num_bytes for job in [*worker.running, *worker.queue]), default=0)
            count = num_to_take(owed(worker.progress, bytes_, now), theirs, mine)
            if count:
                self._move(list(worker.progress.making)[-count:], worker, number)
                self.num_moved += count
                return

    def _move(self, numbers: Sequence[int], worker: _Worker, number: int) -> None:
        own, waiting = self.workers[0], {job.number: job for job in worker.queue}
        made = {job.number: job for job in worker.running}
        made |= {job.number: job for _, sender, _, job in self._events if job is not None and sender == number}
        for one in numbers:
            self.num_twice += one not in waiting
            own.queue.append(waiting[one] if one in waiting else made[one])
            worker.progress.making.pop(one)
        worker.queue = [job for job in worker.queue if job.number not in numbers]


def cold(
    jobs: Sequence[Job], believed: Sequence[Member], truth: Sequence[Member], planner: str, steals: bool = True
) -> Cold:
    """A request whose entries are all at the first of the workers, which are planned by what is ``believed`` of them.

    ``steals``: what was not begun may change hands; only the planner that goes by costs has that.
    """
    workers = [_Worker(*both) for both in zip(believed, truth, strict=True)]
    for kind in ("member", "truth"):
        setattr(workers[0], kind, replace(getattr(workers[0], kind), link=NO_LINK, send_s=0.0))
    return Cold(workers, PLANNERS[planner], steals and planner == "longest-first").run(jobs)


def _tokens(jobs: Sequence[Job]) -> list[int]:
    return [job.num_tokens for job in jobs]
