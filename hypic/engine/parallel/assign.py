"""Who encodes which cold segment, and whose copy is fetched: pure, in seconds, from what is known right now.

Longest processing time first: jobs in order of falling cost, each to the worker from which its entry arrives first,
counting the work that is queued there, what this plan has given it already and the steps that takes, the way of the
entry to the combiner and the trouble that both have with it, and whether the worker holds the entry. An entry that
takes the combiner longer to receive than to make is made there, and a plan that is not clearly sooner done than if the
combiner encoded everything is not followed: who adds workers never waits longer by plan. Workers of one kind are taken
to be equally fast (``alike``). A holder only sends; when it is busier than encoding anew would take, the
segment is encoded elsewhere, and so a hot one comes to stand on several workers. Stale knowledge only costs time: a
worker that no longer holds what it was asked for encodes it. ``round_robin`` is the baseline that knows none of this.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypic.engine.parallel.cost import EncodeCost, LinkCost

# A holder's answer needs no step of the model, but waits for the one that runs.
SERVE_S = 1e-3
# Work is given away only if all is there by so much sooner than without: costs are not better known.
PAYS_SHARE = 0.05
# A worker whose steps take this much more or less than those of its kind is another kind, by segments such as these.
OTHER_KIND = 1.3
COMPARED = (1024,) * 8


@dataclass(frozen=True)
class Job:
    """A segment whose entry the combiner lacks; ``holders`` are the ranks that are thought to have it."""

    number: int
    num_tokens: int
    num_bytes: int
    holders: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Member:
    """A worker as a planner sees it: ``queued_s`` of work before anything new, ``link`` to the combiner, ``kind`` of
    device ("": like no other), ``receive_s`` and ``send_s`` of its engine's time for every entry that it receives and
    that it makes for another."""

    rank: int
    encode: EncodeCost
    link: LinkCost
    queued_s: float = 0.0
    kind: str = ""
    receive_s: float = 0.0
    send_s: float = 0.0

    def step_s(self, num_tokens: Sequence[int]) -> float:
        """Seconds for segments that are made for another, in as few steps as hold them."""
        return self.encode.together_s(num_tokens) + len(num_tokens) * self.send_s


def alike(members: Sequence[Member]) -> list[Member]:
    """Members with one cost for each kind of device: what each has measured itself is noisy.

    It is the median's of those whose steps were observed, or else of all. A member keeps its own if nearly all of its
    steps (``EncodeCost.spread``) show that it differs from that by a factor of 1.3.
    """
    by_kind: dict[str, list[EncodeCost]] = {}
    for member in members:
        by_kind.setdefault(member.kind, []).append(member.encode)
    medians = {kind: _median(costs) for kind, costs in by_kind.items() if kind}
    return [_like(member, medians[member.kind]) if member.kind else member for member in members]


def _median(costs: Sequence[EncodeCost]) -> EncodeCost:
    """The lower of two in the middle."""
    observed = [cost for cost in costs if cost.spread] or costs
    return sorted(observed, key=_compared_s)[(len(observed) - 1) // 2]


def _like(member: Member, median: EncodeCost) -> Member:
    own, most = member.encode, OTHER_KIND * member.encode.spread
    ratio = _compared_s(own) / max(_compared_s(median), 1e-12)
    departs = own.spread and not 1 / most <= ratio <= most
    return member if departs else replace(member, encode=replace(median, batch_tokens=own.batch_tokens))


def _compared_s(cost: EncodeCost) -> float:
    return cost.together_s(COMPARED)


@dataclass(frozen=True)
class Placed:
    """A job's place, and seconds from now until its entry is at the combiner."""

    job: Job
    rank: int
    is_fetch: bool
    arrival_s: float


@dataclass
class _Track:
    """What a plan has given a worker so far: ``num_tokens``, which say how many steps there are, ``marginal_s`` that
    their segments add to those, and ``compute_s`` of all else. What a step makes leaves when it ends, one entry after
    the other: ``leaving_s`` is the way of what the last step makes, ``link_s`` when the link is free of all that left
    before."""

    member: Member
    is_combiner: bool
    compute_s: float = field(init=False)
    marginal_s: float = 0.0
    link_s: float = 0.0
    leaving_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.compute_s = self.member.queued_s

    def ends(self, job: Job) -> tuple[float, float, bool]:
        """When the entry would be made and when it would arrive, and whether it would only be sent."""
        member, way_s = self.member, self.member.link.seconds(job.num_bytes)
        marginal_s = self.marginal_s + member.encode.marginal_s(job.num_tokens)
        encoded = self.compute_s + self._send_s + member.encode.steps_s(self.num_tokens + job.num_tokens, marginal_s)
        if self.is_combiner:
            return encoded, encoded, False
        if member.rank in job.holders:
            made = SERVE_S + min(member.queued_s, member.encode.seconds(member.encode.batch_tokens))
            return made, max(made, self.link_s) + way_s, True
        free_s, leaving_s = self._leaving(job)
        return encoded, max(encoded, free_s) + leaving_s + way_s, False

    def busy_s(self) -> float:
        """Until when it encodes what it was given so far."""
        return self.compute_s + self.member.encode.steps_s(self.num_tokens, self.marginal_s)

    @property
    def _send_s(self) -> float:
        """One that is made here for here goes nowhere."""
        return 0.0 if self.is_combiner else self.member.send_s

    def _leaving(self, job: Job) -> tuple[float, float]:
        """When the link is free of what earlier steps make, and the way of what else the step makes that ends with
        this job."""
        batch = self.member.encode.batch_tokens
        is_new = -(-self.num_tokens // batch) < -(-(self.num_tokens + job.num_tokens) // batch)
        return (max(self.link_s, self.last_s), 0.0) if is_new else (self.link_s, self.leaving_s)

    def take(self, job: Job) -> Placed:
        _, arrival, is_fetch = self.ends(job)
        if is_fetch:
            self.link_s = arrival
        else:
            self.link_s, leaving_s = self._leaving(job)
            self.leaving_s = leaving_s + self.member.link.seconds(job.num_bytes)
            self.compute_s += self._send_s
            self.marginal_s += self.member.encode.marginal_s(job.num_tokens)
            self.num_tokens += job.num_tokens
            self.last_s = arrival
        return Placed(job, self.member.rank, is_fetch, arrival)

    def receive(self) -> None:
        """Another's entry is to come here."""
        self.compute_s += self.member.receive_s


Planner = Callable[[Sequence[Job], Sequence[Member], int], list[Placed]]


def longest_first(jobs: Sequence[Job], members: Sequence[Member], combiner: int) -> list[Placed]:
    """See the module's docstring. ``combiner`` is the rank that needs the entries; ties go to it, then to low ranks.

    Raises:
        ValueError: the combiner is none of the members.
    """
    candidates = _candidates(jobs, members, combiner)
    placed, there_s = _greedy(jobs, _tracks(candidates, combiner), frozenset())
    helpers = {place.rank for place in placed if not place.is_fetch} - {combiner}
    if not helpers:
        return placed
    alone, alone_s = _greedy(jobs, _tracks(candidates, combiner), frozenset(member.rank for member in candidates))
    return placed if there_s < (1 - PAYS_SHARE) * alone_s else alone


def _greedy(jobs: Sequence[Job], tracks: Sequence[_Track], only_send: frozenset[int]) -> tuple[list[Placed], float]:
    """Longest first, and when all is done; those that ``only_send`` encode nothing, but for the combiner."""
    own = tracks[0]
    reference = own.member.encode

    def there_s(track: _Track, job: Job) -> tuple[float, float]:
        """When it is there, and the combiner is done with it; then when it came."""
        _, arrival_s, is_fetch = track.ends(job)
        if track.is_combiner:
            return arrival_s, arrival_s
        if not is_fetch and track.member.rank in only_send:
            return math.inf, math.inf
        return max(arrival_s, own.busy_s() + own.member.receive_s), arrival_s

    placed = []
    for job in sorted(jobs, key=lambda job: (-reference.seconds(job.num_tokens), job.number)):
        best = min(tracks, key=lambda track: there_s(track, job))
        placed.append(best.take(job))
        if not best.is_combiner:
            own.receive()
    return placed, max(makespan_s(placed), own.busy_s())


def round_robin(jobs: Sequence[Job], members: Sequence[Member], combiner: int) -> list[Placed]:
    """Job after job to worker after worker, in prompt order, whatever they cost.

    Raises:
        ValueError: the combiner is none of the members.
    """
    tracks = _tracks(members, combiner)
    return [tracks[number % len(tracks)].take(job) for number, job in enumerate(jobs)]


def elsewhere(jobs: Sequence[Job], members: Sequence[Member], combiner: int) -> list[Placed]:
    """As round robin, but the combiner encodes nothing if there is anybody else: for comparing workers.

    Raises:
        ValueError: the combiner is none of the members.
    """
    tracks = _tracks(members, combiner)
    tracks = tracks[1:] or tracks
    return [tracks[number % len(tracks)].take(job) for number, job in enumerate(jobs)]


PLANNERS: Mapping[str, Planner] = {
    "longest-first": longest_first,
    "round-robin": round_robin,
    "elsewhere": elsewhere,
}


def _candidates(jobs: Sequence[Job], members: Sequence[Member], combiner: int) -> list[Member]:
    """Whom a plan can need: the combiner, holders, and as many of the least loaded as there are jobs."""
    named = {combiner}.union(*(job.holders for job in jobs))
    typical = sum(job.num_tokens for job in jobs) // max(len(jobs), 1)
    idle = heapq.nsmallest(len(jobs), members, key=lambda m: (m.queued_s + m.encode.seconds(typical), m.rank))
    chosen = {member.rank: member for member in members if member.rank in named}
    chosen.update({member.rank: member for member in idle})
    return list(chosen.values())


def _tracks(members: Sequence[Member], combiner: int) -> list[_Track]:
    ordered = sorted(members, key=lambda member: (member.rank != combiner, member.rank))
    if not ordered or ordered[0].rank != combiner:
        raise ValueError(f"rank {combiner} combines and is none of the members.")
    return [_Track(member, member.rank == combiner) for member in ordered]


def makespan_s(placed: Sequence[Placed]) -> float:
    """Seconds until the last entry is at the combiner."""
    return max((place.arrival_s for place in placed), default=0.0)
