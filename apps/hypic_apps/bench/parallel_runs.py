"""Cold requests timed: even ones by number of workers, uneven ones by planner, and entries that are only fetched."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from hypic.engine.parallel.cost import EncodeCost, EntrySize, LinkCost
from hypic.engine.parallel.simulate import Fleet, lengths, uneven_ratio
from hypic_apps.bench.parallel import Cold, Handling, Rig
from hypic_apps.bench.records import percentile

SIGMA = 0.8
Record = dict[str, Any]
Told = Callable[[str], None]


@dataclass(frozen=True)
class Clock:
    """No further repetition is begun after ``until_s``, but each measurement has one."""

    until_s: float

    @classmethod
    def of(cls, budget_s: float | None) -> Clock:
        return cls(float("inf") if budget_s is None else time.monotonic() + budget_s)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until_s


def even(
    rig: Rig, nums: Sequence[int], shape: tuple[int, int], runs: int, clock: Clock, told: Told
) -> Iterator[Record]:  # fmt: skip
    """Segments of one length, by number of workers."""
    first_ms = 0.0
    for num_workers in nums:
        told(f"{num_workers} workers, {shape[0]} x {shape[1]:,}")
        rig.use(num_workers)
        found = list[Cold]()
        for run in range(-1, runs):
            cold = rig.cold(rig.documents([shape[1]] * shape[0], 100 + run))
            found += [cold] if run >= 0 else []
            if found and clock.is_over:
                break
        record = _record(num_workers, shape, found)
        first_ms = first_ms or record["ttft_ms_p50"]
        yield {**record, "speedup": first_ms / record["ttft_ms_p50"]}


def _record(num_workers: int, shape: tuple[int, int], found: Sequence[Cold]) -> Record:
    carry_s, came_bytes = sum(c.carry_s for c in found), sum(c.came_bytes for c in found)
    return {
        **{"workers": num_workers, "segments": shape[0], "segment_tokens": shape[1], "runs": len(found)},
        "ttft_ms_p50": _ms([c.ttft_s for c in found]),
        "ttft_ms_p90": _ms([c.ttft_s for c in found], 90),
        "dispatch_ms": _ms([c.plan_s for c in found]),
        "own_ms": _ms([c.own_s for c in found]),
        "wait_ms": _ms([c.wait_s for c in found]),
        "exchange_ms": _ms([c.carry_s / max(num_workers - 1, 1) for c in found]),
        "combine_ms": _ms([c.combine_s for c in found]),
        "entries_sent": percentile([c.num_came for c in found], 50),
        "encoded_again": sum(c.num_again for c in found),
        "taken_back": sum(c.num_taken_back for c in found),
        "handling": total([c.handling for c in found]).record,
        "link_gb_per_s": came_bytes / carry_s / 1e9 if carry_s else None,
    }


def total(found: Iterable[Handling]) -> Handling:
    return reduce(Handling.and_of, found, Handling())


def uneven(
    rig: Rig, num_workers: int, mean_tokens: int, count: int, seeds: int, clock: Clock, told: Told
) -> Iterator[Record]:  # fmt: skip
    """Lognormal segments: round robin's time over longest-first's, median over the seeds so far, after each of them.

    Each is timed at its second run of these lengths, with other texts: what is compiled and allocated at first use
    would be paid by whoever comes first, and who was asked for a text before is thought to hold it. They take turns.
    """
    spent: dict[str, list[Cold]] = {"longest-first": [], "round-robin": []}
    texts = itertools.count(1000)
    for seed in range(seeds):
        told(f"{num_workers} workers, {count} uneven segments, seed {seed}")
        tokens = lengths(np.random.default_rng(seed), count, mean_tokens, SIGMA)
        for planner in sorted(spent, reverse=seed % 2 == 1):
            rig.use(num_workers, planner)
            spent[planner].append([rig.cold(rig.documents(tokens, next(texts))) for _ in range(2)][-1])
        about = {"workers": num_workers, "segments": count, "mean_tokens": mean_tokens, "sigma": SIGMA}
        yield {**about, **_by_planner(spent), "ratio_by_tokens": by_tokens(num_workers, count, mean_tokens, seed + 1)}
        if clock.is_over:
            return


def by_tokens(num_workers: int, count: int, mean_tokens: int, seeds: int) -> float:
    """The ratio that there would be if tokens took time and nothing else: what the order alone can gain."""
    fleet = Fleet(num_workers, EncodeCost(0.0, 1.0), LinkCost(0.0, 0.0), EntrySize(0, 0))
    return uneven_ratio(fleet, count, mean_tokens, SIGMA, seeds)


def _by_planner(spent: Mapping[str, Sequence[Cold]]) -> Record:
    times = {name: [1e3 * cold.ttft_s for cold in found] for name, found in spent.items()}
    ratios = [slow / fast for slow, fast in zip(times["round-robin"], times["longest-first"], strict=True)]
    return {
        **{f"{name}_ms": found for name, found in times.items()},
        **{f"{name}_ms_p50": percentile(found, 50) for name, found in times.items()},
        **{f"{name}_sent": [cold.num_came for cold in found] for name, found in spent.items()},
        "taken_back": sum(cold.num_taken_back for cold in spent["longest-first"]),
        "encoded_again": sum(cold.num_again for found in spent.values() for cold in found),
        **{"seeds": len(ratios), "ratio_p50": percentile(ratios, 50), "ratio_min": min(ratios)},
    }


def fetch(rig: Rig, num_workers: int, shape: tuple[int, int], runs: int, clock: Clock, told: Told) -> Record:
    """Entries that lie on other workers: what the links carry when nothing has to be encoded."""
    told(f"{num_workers} workers, {shape[0]} x {shape[1]:,} fetched")
    spent, rates, nums, each = list[float](), list[float](), list[int](), list[float]()
    handled = list[Handling]()
    for run in range(runs):
        documents = rig.documents([shape[1]] * shape[0], 500 + run)
        rig.use(num_workers, "elsewhere")  # both times the same segments of the same worker
        rig.ask(documents)
        rig.forget_here()
        before, began_s = rig.counts, time.monotonic()
        spent.append(rig.ask(documents).ttft_s)
        after = rig.counts
        nums.append(after.fetched - before.fetched)
        handled.append(Handling.between(before, after))
        taken_s = max(after.last_came_s - began_s, 1e-9)
        rates.append((after.came_bytes - before.came_bytes) / taken_s / 1e9)
        each.append(taken_s / max(nums[-1], 1))
        rig.forget()
        if clock.is_over:
            break
    return {
        **{"workers": num_workers, "segments": shape[0], "segment_tokens": shape[1], "runs": len(spent)},
        **{"entries_fetched": percentile(nums, 50), "ttft_ms_p50": _ms(spent), "gb_per_s": percentile(rates, 50)},
        "entry_ms": _ms(each),
        "handling": total(handled).record,
    }


def _ms(seconds: Sequence[float], percent: int = 50) -> float:
    return 1e3 * percentile(seconds, percent)
