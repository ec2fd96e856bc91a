"""One cold request played step by step, with costs that are believed and costs that are true: what a wrong plan takes.

Workers run steps of ``batch_tokens``, an entry leaves when its step ends, and between its steps the combiner does
what it does in earnest (``stealing.py``): when it is idle it takes back what a peer cannot have begun, and when a
peer is, it plans anew what waits. A step that runs is not ended; what it holds whole is not taken. No model runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypic.engine.parallel.assign import PLANNERS, Job, Member, Planner, alike
from hypic.engine.parallel.cost import NO_LINK, EncodeCost
from hypic.engine.parallel.stealing import num_begun, num_to_take


@dataclass
class _Worker:
    """``member`` is what is believed; what waits, what its step holds, since when, and when its link is free."""

    member: Member
    truth: EncodeCost
    queue: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    began_s: float = 0.0
    link_s: float = 0.0

    def start(self, now: float) -> float | None:
        """When the step ends that begins now, if one does."""
        if self.running or not self.queue:
            return None
        count = num_begun(_tokens(self.queue), self.truth.batch_tokens)
        self.running, self.queue, self.began_s = self.queue[:count], self.queue[count:], now
        return now + self.truth.together_s(_tokens(self.running))

    def finish(self, now: float) -> float:
        """When the last entry of the step that ends now is at the combiner."""
        for job in self.running:
            self.link_s = max(now, self.link_s) + self.member.link.seconds(job.num_bytes)
        self.running = []
        return self.link_s


@dataclass
class _Cold:
    """A request in the making; the first worker combines."""

    workers: list[_Worker]
    planner: Planner
    steals: bool
    num_moved: int = 0

    def run(self, jobs: Sequence[Job]) -> float:
        """Seconds until the last entry is there."""
        ends, last_s = list[tuple[float, int]](), 0.0
        self._plan(jobs, self.workers)
        now = 0.0
        while True:
            for number, worker in enumerate(self.workers):
                end_s = worker.start(now)
                if end_s is not None:
                    heapq.heappush(ends, (end_s, number))
            if not ends:
                return last_s
            now, number = heapq.heappop(ends)
            last_s = max(last_s, self.workers[number].finish(now))
            if self.steals and not self.workers[0].running:
                self._rebalance(now)

    def _plan(self, jobs: Sequence[Job], workers: Sequence[_Worker]) -> None:
        members = alike([worker.member for worker in workers])
        by_rank = {worker.member.rank: worker for worker in workers}
        for place in self.planner(jobs, members, self.workers[0].member.rank):
            by_rank[place.rank].queue.append(place.job)

    def _rebalance(self, now: float) -> None:
        own, *others = self.workers
        first = num_begun(_tokens(own.queue), own.truth.batch_tokens)
        idle = [worker for worker in others if not worker.running and not worker.queue]
        if own.queue[first:] and idle:
            # What the next step here holds is counted by the planner as work of this plan, and stays.
            later, own.queue = own.queue[first:], own.queue[:first]
            before = len(own.queue)
            self._plan(later, [self._queued(own), *idle])
            self.num_moved += len(later) - (len(own.queue) - before)
        elif not own.queue:
            self._take_back(own, others, now)

    def _queued(self, own: _Worker) -> _Worker:
        queued_s = own.member.encode.together_s(_tokens(own.queue))
        member = Member(own.member.rank, own.member.encode, own.member.link, queued_s, own.member.kind)
        return _Worker(member, own.truth, own.queue)

    def _take_back(self, own: _Worker, others: Sequence[_Worker], now: float) -> None:
        for worker in others:
            awaited = [*worker.running, *worker.queue]
            mine, theirs = (member.encode for member in alike([own.member, worker.member]))
            count = min(num_to_take(_tokens(awaited), theirs, mine, now - worker.began_s), len(worker.queue))
            if count:
                own.queue, worker.queue = worker.queue[-count:], worker.queue[:-count]
                self.num_moved += count
                return


def cold_s(
    jobs: Sequence[Job], believed: Sequence[Member], truth: Sequence[EncodeCost], planner: str, steals: bool = True
) -> float:
    """Seconds until all entries are at the first of the workers, which are planned by what is ``believed`` of them.

    ``steals``: what was not begun may change hands; only the planner that goes by costs has that.
    """
    workers = [_Worker(member, cost) for member, cost in zip(believed, truth, strict=True)]
    workers[0].member = replace(workers[0].member, link=NO_LINK)
    return _Cold(workers, PLANNERS[planner], steals and planner == "longest-first").run(jobs)


def _tokens(jobs: Sequence[Job]) -> list[int]:
    return [job.num_tokens for job in jobs]
