"""Which of an engine's encodes its peers do, and which it takes back: on admission, and between two steps.

A plan is made by costs in seconds (``parallel/assign.py``) over what is known of the peers; what goes away waits in the
engine's table of encodes, named by ``away``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypic.engine.arrivals import Arrivals, awaited
from hypic.engine.asking import Asking
from hypic.engine.encode import Encode
from hypic.engine.own_work import OwnWork, job_of
from hypic.engine.parallel.assign import PLANNERS, Placed, alike
from hypic.engine.parallel.stealing import to_take_back
from hypic.engine.parallel.wants import Pending


class Placing:
    """Implements ``jobs.Away``, on the engine's thread.

    ``planner`` is a name of ``parallel.assign.PLANNERS``; it and ``only``, the ranks that may be asked (``None``: all),
    may be changed between two requests.
    """

    def __init__(self, own: OwnWork, asking: Asking, arrivals: Arrivals, planner: str) -> None:
        self.planner = planner
        self.only: frozenset[int] | None = None
        self._own, self._asking, self._arrivals = own, asking, arrivals

    @property
    def receive_s(self) -> float:
        """What an entry that comes takes of this engine's time."""
        return self._arrivals.receive_s

    @property
    def send_s(self) -> float:
        """What an entry takes of the time of the engine that made it."""
        return self._arrivals.send_s

    def offer(self, jobs: Sequence[Encode]) -> None:
        """Give away what others have sooner; the rest stays where it is."""
        started = time.monotonic()
        fresh = [job for job in jobs if job.base is None and not job.done]
        for is_alone in (False, True):
            self.place([job for job in fresh if job.is_alone is is_alone], 0)
        self._asking.counts.plan_s += time.monotonic() - started

    def withdraw(self, job: Encode) -> None:
        self._asking.take_back(job.away)

    def keep(self, job: Encode) -> None:
        """Workers that ask each other for one segment would wait for ever: where others ask for what is awaited of a
        higher rank, it is made after all. Of any that stand in a ring one does."""
        rank = self._asking.wants.rank_of(job.away)
        if rank is not None and rank > self._own.me.rank:
            self._make_here(job)

    def rebalance(self) -> None:
        """Between two steps: take back what a peer has not begun, if there is nothing else to do here; plan again what
        waits here, if a peer has nothing to do."""
        if self.planner != "longest-first" or self._own.admission is None:
            return
        with self._asking.lock:
            if not self._own.here():
                self._take_back()
            elif later := self._own.later():
                idle = self._asking.view.idle(self._asking.wants.waiting(), time.monotonic())
                self.offer(later if any(map(self._may_ask, idle)) else ())

    def place(self, jobs: Sequence[Encode], attempt: int) -> None:
        """Plan these; ``attempt`` is how often that was done before."""
        now, view = time.monotonic(), self._asking.view
        with self._asking.lock:
            given = view.members(now, self.send_s)
            members = [member for member in given if self._may_ask(member.rank, jobs)]
            ranks = [member.rank for member in members]
            wanted = [job_of(number, job, view, ranks) for number, job in enumerate(jobs)]
            if not members or not wanted:
                return
            own = self._own.member(self.receive_s, jobs)
            placed = PLANNERS[self.planner](wanted, alike([own, *members]), own.rank)
            away = [place for place in placed if place.rank != own.rank]
            # What is asked at once of a peer is encoded in steps of many, so all of it may come with the last.
            last_s = {place.rank: place.arrival_s for place in sorted(away, key=lambda place: place.arrival_s)}
            self._asking.ask(
                [self._send_away(jobs[place.job.number], place, last_s[place.rank], attempt, now) for place in away]
            )

    def _send_away(self, job: Encode, place: Placed, last_s: float, attempt: int, now: float) -> Pending:
        asking, peer = self._asking, self._asking.view.peers[place.rank]
        arrival_s = place.arrival_s if place.is_fetch else last_s
        pending = Pending(asking.nonce(), job.entry, peer.id, place.is_fetch, now, arrival_s, attempt, peer.late)
        job.away, asking.counts.asked = pending.nonce, asking.counts.asked + 1
        asking.view.promised(place.rank, arrival_s, now)
        if not place.is_fetch:
            peer.progress.asked(pending.nonce, len(job.entry.ids), now)
        return pending

    def _may_ask(self, rank: int, jobs: Sequence[Encode] = ()) -> bool:
        """Of deterministic requests' segments only those are asked for whose bits are the same."""
        alone = [len(job.entry.ids) for job in jobs if job.is_alone]
        most = self._own.pace.cost.batch_tokens
        is_exact = not alone or (max(alone) <= most and self._asking.view.is_exact(rank, max(alone)))
        return is_exact and rank in self._asking.connections and (self.only is None or rank in self.only)

    def _take_back(self) -> None:
        asking, encoding = self._asking, self._own.encoding
        waiting = [one for one in asking.wants.waiting() if awaited(one, encoding)]
        own = self._own.member(self.receive_s)
        for pending in to_take_back(waiting, own, asking.view, time.monotonic()):
            self._make_here(encoding[pending.key])

    def _make_here(self, job: Encode) -> None:
        """After all, unless it has come meanwhile."""
        if self._asking.take_back(job.away):
            job.away, self._asking.counts.taken_back = 0, self._asking.counts.taken_back + 1
