"""Fleets of workers that are not here, played with the costs that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hypic.engine.parallel.cost import EncodeCost, EntrySize, LinkCost
from hypic.engine.parallel.simulate import Fleet, Trace, cold_request_s, play, uneven_ratio
from hypic_apps.bench.options import note
from hypic_apps.bench.parallel_runs import SIGMA
from hypic_apps.cli.errors import InputError

Result = dict[str, Any]
PLANNERS = ("longest-first", "round-robin")


def combine(even: Sequence[Result]) -> tuple[float, float] | None:
    """Seconds that answering from entries took, whatever their number, and for each of them: least squares over the
    measured shapes, neither below 0. ``None`` if nothing was measured."""
    if not even:
        return None
    nums, seconds = np.array([[record["segments"], 1e-3 * record["combine_ms"]] for record in even]).T
    apart = nums - nums.mean()
    each_s = max(0.0, float(apart @ seconds) / max(float(apart @ apart), 1e-9))
    return max(0.0, float(seconds.mean() - each_s * nums.mean())), each_s


def simulated(
    costs: Result, count: int, combining: tuple[float, float] | None, num_requests: int, load: float, fail_rate: float
) -> Result:
    """A fleet of ``count`` workers: one cold request, and a stream of them. Unmeasured, answering takes a small step.

    Raises:
        InputError: no cost of encoding was measured.
    """
    if costs["encode"] is None:
        raise InputError("one worker measures no cost to simulate with; pass --counts 1,2 or --cost.")
    note(f"simulating {count} workers")
    encode = EncodeCost(**costs["encode"])
    combine_s, combine_segment_s = combining or (encode.seconds(256), 0.0)
    link, size = LinkCost(**costs["link"]), EntrySize(**costs["entry"])
    fleet = Fleet(count, encode, link, size, combine_s, combine_segment_s, fail_rate=fail_rate)
    # Half of a request's segments are taken to be found somewhere.
    service_s = fleet.combine(24) + 12 * fleet.encode.marginal_s(512)
    trace = Trace(num_requests, rate_s=load * count / service_s)
    played = {name: play(fleet, trace, name) for name in PLANNERS}
    best = played["longest-first"]
    return {
        "workers": count,
        "cold_64x1024_speedup": _cold_speedup(fleet),
        "uneven_ratio": uneven_ratio(fleet, 32, 1024, SIGMA, 20),
        **{
            f"{name}_ttft_ms": {f"p{p}": 1e3 * one.percentile(p / 100) for p in (50, 90, 99)}
            for name, one in played.items()
        },
        **{name: getattr(best, name) for name in ("hits", "fetched", "encoded", "recomputed", "busy_share")},
    }


def _cold_speedup(fleet: Fleet) -> float:
    one = replace(fleet, num_workers=1)
    return cold_request_s(one, [1024] * 64, "longest-first") / cold_request_s(fleet, [1024] * 64, "longest-first")
