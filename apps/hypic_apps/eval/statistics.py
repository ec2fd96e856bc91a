"""Intervals of 95 %: Wilson's for shares, paired bootstrap for means and for gaps between arms on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hypic_apps.eval.grading import Mark
from hypic_apps.train.scores import wilson

RESAMPLES, SEED = 2000, 1
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value between ``low`` and ``high``."""

    value: float
    low: float
    high: float


def estimate(marks: Sequence[Mark], *, is_share: bool) -> Interval | None:
    """A metric of one arm; ``None`` where nothing counts, such as the precision of refusals without a refusal.

    ``is_share``: every mark is one of yes and no.
    """
    top, bottom = _columns(marks)
    number = bottom.sum()
    if not number:
        return None
    value = float(top.sum() / number)
    if is_share:
        return Interval(value, *wilson(int(top.sum()), int(number)))
    return _between(value, _resampled(top, bottom))


def gap(marks: Sequence[Mark], baseline: Sequence[Mark]) -> Interval | None:
    """How much more or less an arm gets than the baseline on the same items, resampled pair by pair.

    Where no item differs, resampling would claim certainty: the interval is then that of a share of none, both ways.
    """
    top, bottom = _columns(marks)
    top_before, bottom_before = _columns(baseline)
    if not bottom.sum() or not bottom_before.sum():
        return None
    if list(marks) == list(baseline):
        most = wilson(0, len(top))[1]
        return Interval(0.0, -most, most)
    value = float(top.sum() / bottom.sum() - top_before.sum() / bottom_before.sum())
    return _between(value, _resampled(top, bottom) - _resampled(top_before, bottom_before))


def mean_of(found: Sequence[Interval]) -> Interval:
    """The mean of independent values; their distances to either end of their intervals add up in squares."""
    value = sum(one.value for one in found) / len(found)
    below = math.sqrt(sum((one.value - one.low) ** 2 for one in found)) / len(found)
    above = math.sqrt(sum((one.high - one.value) ** 2 for one in found)) / len(found)
    return Interval(value, value - below, value + above)


def _columns(marks: Sequence[Mark]) -> tuple[Numbers, Numbers]:
    rows = np.asarray(marks, np.float64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _resampled(top: Numbers, bottom: Numbers) -> Numbers:
    """The metric of ``RESAMPLES`` samples with replacement; the same items are drawn for every arm."""
    drawn = _drawn(len(top))
    totals = drawn @ bottom
    shares: Numbers = np.divide(drawn @ top, totals, out=np.full(RESAMPLES, np.nan), where=totals > 0)
    return shares


@lru_cache(maxsize=4)
def _drawn(number: int) -> Numbers:
    """``[RESAMPLES, number]``: how often each item is drawn."""
    drawn = np.random.default_rng(SEED).integers(number, size=(RESAMPLES, number))
    drawn += number * np.arange(RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * number).reshape(RESAMPLES, number).astype(np.float64)


def _between(value: float, spread: Numbers) -> Interval:
    low, high = np.nanpercentile(spread, [2.5, 97.5])
    return Interval(value, float(low), float(high))
