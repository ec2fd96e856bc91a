"""The planner at fleet scale, on a laptop: up to 1,024 workers and a bursty trace, played with measured costs.

A discrete-event model of what the workers do: each has one queue of work, first come first served; a request's cold
segments are placed by the very planner that places real ones, with knowledge of queues and holders that is as stale as
heartbeats make it; entries travel over links of the measured cost; the combiner then runs its rows. Workers may fail:
what they were doing is encoded again by the combiner, after the deadline. Steps are taken to be full: what each costs
whatever it holds is planned with, and not played. No model runs, no answer is made.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hypic.engine.parallel.assign import PLANNERS, Job, Member, Placed, makespan_s
from hypic.engine.parallel.cost import EncodeCost, EntrySize, LinkCost

MOST_WORKERS = 1024


@dataclass(frozen=True)
class Fleet:
    """Workers and what their work costs; ``capacity`` counts the entries that each can keep.

    Raises:
        ValueError: fewer than one worker or more than 1,024.
    """

    num_workers: int
    encode: EncodeCost
    link: LinkCost
    size: EntrySize
    combine_s: float = 0.0
    combine_segment_s: float = 0.0
    decode_s: float = 0.0
    capacity: int = 100_000
    stale_s: float = 0.25
    jitter: float = 0.1
    fail_rate: float = 0.0
    deadline_s: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MOST_WORKERS:
            raise ValueError(f"num_workers is {self.num_workers}; simulate 1 to {MOST_WORKERS}.")

    def combine(self, num_segments: int) -> float:
        return self.combine_s + num_segments * self.combine_segment_s


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: ``documents`` by number, each ``(number, tokens)``, in prompt order."""

    time_s: float
    documents: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Trace:
    """A bursty stream: gamma-distributed gaps of variation ``burst`` about a mean of ``1 / rate_s``."""

    num_requests: int
    rate_s: float
    num_documents: int = 2000
    segments: int = 24
    mean_tokens: int = 512
    sigma: float = 0.8
    zipf: float = 1.0
    burst: float = 3.0
    seed: int = 0

    def __iter__(self) -> Iterator[Arrival]:
        random = np.random.default_rng(self.seed)
        tokens = lengths(random, self.num_documents, self.mean_tokens, self.sigma)
        weights = np.arange(1, self.num_documents + 1, dtype=np.float64) ** -self.zipf
        weights /= weights.sum()
        shape = 1.0 / self.burst**2
        time_s, count = 0.0, min(self.segments, self.num_documents)
        for _ in range(self.num_requests):
            time_s += float(random.gamma(shape, 1.0 / (shape * self.rate_s)))
            chosen = random.choice(self.num_documents, size=count, replace=False, p=weights)
            yield Arrival(time_s, tuple((int(d), int(tokens[d])) for d in chosen))


def lengths(random: np.random.Generator, count: int, mean_tokens: int, sigma: float) -> Sequence[int]:
    """Lognormal token counts, at least 16."""
    drawn = random.lognormal(math.log(mean_tokens) - sigma * sigma / 2, sigma, size=count)
    return [max(16, round(float(value))) for value in drawn]


@dataclass
class _Worker:
    """One worker's clock: busy until when, what it holds (least recently used first), and until when others think so.

    Whoever hands out work counts it at once, at its predicted cost; what it really took is heard of with heartbeats.
    """

    free_s: float = 0.0
    told_s: float = 0.0
    told_free_s: float = 0.0
    busy_s: float = 0.0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def known_queue_s(self, now: float, stale_s: float) -> float:
        if now - self.told_s >= stale_s:
            self.told_s, self.told_free_s = now, self.free_s
        return max(self.told_free_s - now, 0.0)

    def work(self, now: float, predicted_s: float, factor: float = 1.0) -> float:
        self.told_free_s = max(self.told_free_s, now) + predicted_s
        self.free_s = max(self.free_s, now) + predicted_s * factor
        self.busy_s += predicted_s * factor
        return self.free_s

    def keep(self, document: int, capacity: int) -> list[int]:
        self.held[document] = None
        self.held.move_to_end(document)
        return [self.held.popitem(last=False)[0] for _ in range(len(self.held) - capacity)]


@dataclass(frozen=True)
class Played:
    """What a fleet made of a trace; times are seconds by request."""

    ttft_s: tuple[float, ...]
    hits: int
    fetched: int
    encoded: int
    recomputed: int
    sent_bytes: int
    busy_share: float

    def percentile(self, share: float) -> float:
        return float(np.quantile(np.asarray(self.ttft_s), share)) if self.ttft_s else 0.0


@dataclass
class _Play:
    fleet: Fleet
    planner: str
    workers: list[_Worker]
    holders: dict[int, set[int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("hits", "fetched", "encoded", "again"), 0))
    sent_bytes: int = 0

    def answer(self, arrival: Arrival, random: np.random.Generator) -> float:
        """Seconds to the first token."""
        now, fleet = arrival.time_s, self.fleet
        queues = [worker.known_queue_s(now, fleet.stale_s) for worker in self.workers]
        combiner = min(range(len(queues)), key=lambda rank: (queues[rank], self._missing(arrival, rank), rank))
        wanted = dict(arrival.documents)
        missing = [document for document in wanted if document not in self.workers[combiner].held]
        self.counts["hits"] += len(wanted) - len(missing)
        jobs = [self._job(number, document, wanted[document]) for number, document in enumerate(missing)]
        members = [Member(rank, fleet.encode, fleet.link, queue) for rank, queue in enumerate(queues)]
        placed = PLANNERS[self.planner](jobs, members, combiner) if jobs else []
        ready = max([self._carry_out(place, missing, now, combiner, random) for place in placed], default=now)
        for document in wanted:
            self._keep(combiner, document)
        end = self.workers[combiner].work(max(ready, now), fleet.combine(len(wanted)), self._factor(random))
        self.workers[combiner].work(end, fleet.decode_s, self._factor(random))
        return end - now

    def _factor(self, random: np.random.Generator) -> float:
        return float(random.lognormal(0.0, self.fleet.jitter))

    def _missing(self, arrival: Arrival, rank: int) -> int:
        return sum(document not in self.workers[rank].held for document, _ in arrival.documents)

    def _job(self, number: int, document: int, tokens: int) -> Job:
        holders = frozenset(self.holders.get(document, ()))
        return Job(number, tokens, self.fleet.size.of(tokens), holders)

    def _carry_out(
        self, place: Placed, missing: list[int], now: float, combiner: int, random: np.random.Generator
    ) -> float:
        fleet, document, job = self.fleet, missing[place.job.number], place.job
        fails = place.rank != combiner and random.random() < fleet.fail_rate
        if fails:
            self.counts["again"] += 1
            return self.workers[combiner].work(now + fleet.deadline_s, fleet.encode.seconds(job.num_tokens))
        if place.is_fetch:
            self.counts["fetched"] += 1
            made = now
        else:
            self.counts["encoded"] += 1
            made = self.workers[place.rank].work(now, fleet.encode.marginal_s(job.num_tokens), self._factor(random))
        if place.rank == combiner:
            return made
        self._keep(place.rank, document)
        self.sent_bytes += job.num_bytes
        return made + fleet.link.seconds(job.num_bytes)

    def _keep(self, rank: int, document: int) -> None:
        self.holders.setdefault(document, set()).add(rank)
        for evicted in self.workers[rank].keep(document, self.fleet.capacity):
            self.holders[evicted].discard(rank)


def play(fleet: Fleet, trace: Trace, planner: str = "longest-first") -> Played:
    """A trace on a fleet.

    Raises:
        ValueError: the planner is not known.
    """
    if planner not in PLANNERS:
        raise ValueError(f"planner is {planner!r}; choose one of {', '.join(PLANNERS)}.")
    state = _Play(fleet, planner, [_Worker() for _ in range(fleet.num_workers)])
    random, last = np.random.default_rng(trace.seed + 1), 0.0
    ttfts = []
    for arrival in trace:
        ttfts.append(state.answer(arrival, random))
        last = arrival.time_s
    last = max([last, *(worker.free_s for worker in state.workers)])
    busy = sum(worker.busy_s for worker in state.workers) / max(last * fleet.num_workers, 1e-9)
    counts = state.counts
    return Played(
        tuple(ttfts), counts["hits"], counts["fetched"], counts["encoded"], counts["again"], state.sent_bytes, busy
    )


def cold_request_s(fleet: Fleet, tokens: Sequence[int], planner: str) -> float:
    """Seconds until all entries of one cold request are at the combiner, nobody having anything else to do."""
    jobs = [Job(number, count, fleet.size.of(count)) for number, count in enumerate(tokens)]
    members = [Member(rank, fleet.encode, fleet.link) for rank in range(fleet.num_workers)]
    return makespan_s(PLANNERS[planner](jobs, members, 0)) + fleet.combine(len(tokens))


def uneven_ratio(fleet: Fleet, num_segments: int, mean_tokens: int, sigma: float, seeds: int) -> float:
    """Round robin's time over longest-first's for lognormal segments, median over seeds."""
    ratios = []
    for seed in range(seeds):
        tokens = lengths(np.random.default_rng(seed), num_segments, mean_tokens, sigma)
        slow, fast = (cold_request_s(fleet, tokens, name) for name in ("round-robin", "longest-first"))
        ratios.append(slow / fast)
    return float(np.median(ratios))
