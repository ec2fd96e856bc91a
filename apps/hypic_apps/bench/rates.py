"""The search for the highest rate of requests that keeps a promise, and what is made of the rates that were played.

A rate is played with as many requests as arrive in ``seconds``, and never fewer than ``requests``: a burst that is over
before a queue has built up would hold at any rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
GROWTH = 1.5


@dataclass(frozen=True)
class Rates:
    """Which rates are played: those named, or a ladder from ``first`` until the objective breaks, then ``refine``
    rates in between."""

    named: Sequence[float] = ()
    first: float = 0.5
    refine: int = 2
    objective_s: float = 1.0
    timeout_s: float = 300.0
    requests: int = 30
    seconds: float = 10.0

    def count(self, qps: float) -> int:
        """Requests that are played at a rate."""
        return max(self.requests, math.ceil(qps * self.seconds))


# A rate and a number of requests to a record; nothing where the trace has no requests left.
Play = Callable[[float, int], Record | None]


def search(play: Play, plan: Rates) -> Iterator[Record]:
    """Records of the rates that were played, each with whether it ``held`` the objective."""
    if plan.named:
        yield from (found for qps in plan.named if (found := _tried(play, qps, plan)) is not None)
        return
    good, bad = 0.0, None
    for found in _ladder(play, plan):
        good, bad = (found["qps"], bad) if found["held"] else (good, found["qps"])
        yield found
    for _ in range(plan.refine if good and bad is not None else 0):
        assert bad is not None, "there is something between what held and what broke"
        middle = _tried(play, math.sqrt(good * bad), plan)
        if middle is None:
            return
        good, bad = (middle["qps"], bad) if middle["held"] else (good, middle["qps"])
        yield middle


def _ladder(play: Play, plan: Rates) -> Iterator[Record]:
    """Up from the first rate until one breaks; down where the first one broke."""
    qps, step = plan.first, GROWTH
    while (found := _tried(play, qps, plan)) is not None:
        yield found
        if qps == plan.first and not found["held"]:
            step = 1 / GROWTH
        elif found["held"] != (step > 1):
            return
        qps *= step


def _tried(play: Play, qps: float, plan: Rates) -> Record | None:
    record = play(qps, plan.count(qps))
    if record is None:
        return None
    held = record["is_whole"] and not record["failed"] and record["ttft_ms_p90"] <= 1e3 * plan.objective_s
    return {"qps": qps, **record, "held": held}


def sustained(records: Sequence[Record]) -> dict[str, float]:
    """The highest rate that held the objective, by arm; 0 where none did."""
    arms = dict.fromkeys(record["arm"] for record in records)
    return {arm: max((r["qps"] for r in records if r["arm"] == arm and r["held"]), default=0.0) for arm in arms}


def ratios(records: Sequence[Record]) -> list[Record]:
    """Against no reuse at the same rate: TTFT, which should be low, and throughput, which should be high."""
    plain = {r["qps"]: r for r in records if r["arm"] == "none" and r["output_tokens_per_s"]}
    return [_ratio(record, plain[record["qps"]]) for record in records
            if record["arm"] != "none" and record["qps"] in plain]  # fmt: skip


def _ratio(record: Record, plain: Record) -> Record:
    return {
        "arm": record["arm"],
        "qps": record["qps"],
        **{f"ttft_{p}": record[f"ttft_ms_{p}"] / plain[f"ttft_ms_{p}"] for p in ("p50", "p90")},
        "throughput": record["output_tokens_per_s"] / plain["output_tokens_per_s"],
    }
