"""Marks of a set, item by item, and the numbers that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from hypic_apps.eval.arms import FULL
from hypic_apps.eval.grading import MEANS, QUALITY, Mark
from hypic_apps.eval.statistics import Interval, estimate, gap


@dataclass(frozen=True)
class Record:
    """One number: a metric of an arm on a set, and its gap to full recompute on the same ``n`` items."""

    model: str
    set: str
    arm: str
    metric: str
    value: float
    n: int
    low: float | None = None
    high: float | None = None
    gap_to_full: float | None = None
    gap_low: float | None = None
    gap_high: float | None = None


@dataclass
class Measured:
    """One set's marks: ``by_arm[arm][metric]`` has one pair per item, ``None`` where the arm has no such prompt."""

    name: str
    num_items: int = 0
    by_arm: dict[str, dict[str, list[Mark | None]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arm: str, found: Mapping[str, Mark], number: int) -> None:
        """Notes the marks of one item, in the items' order; those left out count as ``None``."""
        for metric, mark in found.items():
            self.put(arm, metric, number, [mark])

    def marks(self, arm: str, metric: str) -> list[Mark | None]:
        """One entry per item."""
        column = self.by_arm.get(arm, {}).get(metric, [])
        return column + [None] * (self.num_items - len(column))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The marks of blocks of one set, in the items' order; a part without items adds to those of the first."""
        whole = cls(parts[0].name)
        for part in parts:
            before = whole.num_items if part.num_items else 0
            for arm, columns in part.by_arm.items():
                for metric, column in columns.items():
                    whole.put(arm, metric, before, column)
            for arm, seconds in part.seconds.items():
                whole.seconds.setdefault(arm, []).extend(seconds)
            whole.num_items += part.num_items
        return whole

    def put(self, arm: str, metric: str, start: int, found: Sequence[Mark | None]) -> None:
        """Marks of the items from number ``start`` on, behind all that the column holds."""
        column = self.by_arm.setdefault(arm, {}).setdefault(metric, [])
        column += [None] * (start - len(column)) + list(found)


def records(model: str, found: Measured) -> list[Record]:
    """All numbers of a set."""
    out = []
    for arm, columns in found.by_arm.items():
        for metric in columns:
            out += _record(model, found, arm, metric)
        if arm in found.seconds:
            times = found.seconds[arm]
            out.append(Record(model, found.name, arm, "ttft_s", median(times), len(times), min(times), max(times)))
    return out


def _record(model: str, found: Measured, arm: str, metric: str) -> list[Record]:
    pairs = list(zip(found.marks(arm, metric), found.marks(FULL, metric), strict=True))
    own = [mark for mark, _ in pairs if mark is not None]
    value = estimate(own, is_share=metric not in MEANS)
    if value is None:
        return []
    both = [(mark, before) for mark, before in pairs if mark is not None and before is not None]
    apart: Interval | None = None
    if arm != FULL and metric in QUALITY and both:
        apart = gap([mark for mark, _ in both], [before for _, before in both])
    gaps = (None, None, None) if apart is None else (apart.value, apart.low, apart.high)
    return [Record(model, found.name, arm, metric, value.value, len(own), value.low, value.high, *gaps)]
