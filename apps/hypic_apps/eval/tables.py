"""Records as Markdown: arms by sets with intervals, what reuse costs, and drift by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypic_apps.eval.arms import ARMS, FULL
from hypic_apps.eval.drift import DISTANCES, Drift
from hypic_apps.eval.grading import PRIMARY
from hypic_apps.eval.records import Record
from hypic_apps.eval.sets import SETS
from hypic_apps.eval.statistics import Interval, mean_of

Key = tuple[str, str, str]
# The sets whose mean gap is the main figure: those that no order or reference across passages decides.
MEANT = ("S1", "S3", "S6", "S7", "S8")
SHORT = {"exact_match": "exact match", "rouge_l": "ROUGE-L", "tool": "right tool"}


def by_key(records: Sequence[Record]) -> Mapping[Key, Record]:
    """Records by set, arm and metric."""
    return {(r.set, r.arm, r.metric): r for r in records}


def primary(name: str) -> str:
    """The metric by which a set is told."""
    return PRIMARY[SETS[name].form] if name in SETS else "tool" if name == "S9" else "exact_match"


def _names(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(r, field)) for r in records))


def quality(records: Sequence[Record]) -> list[str]:
    """Arms by sets: the set's metric in per cent with its 95 % interval."""
    found, sets = by_key(records), _names(records, "set")
    counts = {name: max(r.n for r in records if r.set == name) for name in sets}
    heads = [f"{name}, {SHORT.get(primary(name), primary(name))} (n={counts[name]})" for name in sets]
    lines = _head("arm", heads)
    for arm in _names(records, "arm"):
        cells = [_share(found.get((name, arm, primary(name)))) for name in sets]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def gaps(records: Sequence[Record]) -> list[str]:
    """Arms by sets: points more or fewer than full recompute on the same items, with the paired 95 % interval.

    The last column is the mean over the sets of ``MEANT``, where there are several.
    """
    found, sets = by_key(records), _names(records, "set")
    meant = [name for name in sets if name in MEANT]
    lines = _head("arm against full", [*sets, *([f"mean of {', '.join(meant)}"] if len(meant) > 1 else [])])
    for arm in _names(records, "arm"):
        rows = {name: apart(found.get((name, arm, primary(name)))) for name in sets}
        if not any(rows.values()):
            continue
        kept = [row for name in meant if (row := rows[name]) is not None]
        last = [mean_of(kept) if len(kept) == len(meant) else None] if len(meant) > 1 else []
        lines.append(f"| {arm} | {' | '.join(_points(row) for row in (*rows.values(), *last))} |")
    return lines


def apart(record: Record | None) -> Interval | None:
    """A record's gap to full recompute, if it has one."""
    if record is None or record.gap_to_full is None or record.gap_low is None or record.gap_high is None:
        return None
    return Interval(record.gap_to_full, record.gap_low, record.gap_high)


def likeness(records: Sequence[Record]) -> list[str]:
    """How like full recompute every arm is, over all sets, and what it costs: means of the sets' values.

    ``TTFT at best`` is what the device's limits allow, against what they allow for full recompute.
    """
    heads = ["same text", "same first token", "KL", "tokens run", "encoded once", "kept", "TTFT", "TTFT at best"]
    lines, full_s = _head("arm", [*heads, "what it is"]), _mean(records, FULL, "floor_s")
    for arm in _names(records, "arm"):
        means = {name: _mean(records, arm, name) for name in ("agreement", "first_token", "kl", "run_share", "ttft_s")}
        cells = [_percent(means["agreement"]), _percent(means["first_token"]), _small(means["kl"])]
        kept, floor_s = (_mean(records, arm, name) for name in ("cached_bytes", "floor_s"))
        cells += [_percent(means["run_share"]), _percent(_mean(records, arm, "encoded_share"))]
        cells += ["" if kept is None else f"{kept / 2**20:.1f} MiB"]
        cells += ["" if means["ttft_s"] is None else f"{1000 * means['ttft_s']:.0f} ms"]
        cells += ["" if not full_s or floor_s is None else _percent(floor_s / full_s)]
        lines.append(f"| {arm} | {' | '.join(cells)} | {ARMS[arm].note if arm in ARMS else ''} |")
    return lines


def others(records: Sequence[Record]) -> list[str]:
    """Every further metric of quality: arms by set and metric."""
    found = by_key(records)
    kept = ("f1", "fact_recall", "refusal_precision", "refusal_recall", "arguments", "rule")
    columns = [(name, m) for name in _names(records, "set") for m in kept if (name, "full", m) in found]
    lines = _head("arm", [f"{name}: {metric.replace('_', ' ')}" for name, metric in columns])
    for arm in _names(records, "arm"):
        lines.append(f"| {arm} | {' | '.join(_share(found.get((name, arm, m))) for name, m in columns)} |")
    return lines if columns else []


def drift(found: Sequence[Drift]) -> list[str]:
    """Layers by arms: the error of the state behind the prompt, or of hidden states in layers without a state."""
    lines = _head("layer", [f"{d.arm}: {part}" for d in found for part in ("state", "hidden")])
    for number, layer in enumerate(found[0].layers):
        cells = [_small(value) for d in found for value in (d.layers[number].state, d.layers[number].hidden)]
        lines.append(f"| {number} ({layer.kind.replace('_attention', '')}) | {' | '.join(cells)} |")
    return lines


def distance(found: Drift) -> list[str]:
    """Layers by distance from the segment's start: the error of cached tokens' hidden states."""
    edges = [f"{low}-{high - 1}" for low, high in zip(DISTANCES, DISTANCES[1:], strict=False)] + [f"{DISTANCES[-1]}+"]
    used = [n for n in range(len(edges)) if any(row[n] is not None for row in found.by_distance)]
    lines = _head("behind layer", [edges[n] for n in used])
    for number, row in enumerate(found.by_distance):
        lines.append(f"| {number} | {' | '.join(_small(row[n]) for n in used)} |")
    return lines


def _head(first: str, heads: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 1)]


def _mean(records: Sequence[Record], arm: str, metric: str) -> float | None:
    values = [r.value for r in records if r.arm == arm and r.metric == metric]
    return sum(values) / len(values) if values else None


def _share(record: Record | None) -> str:
    if record is None:
        return ""
    interval = "" if record.low is None or record.high is None else f" ({100 * record.low:.0f}-{100 * record.high:.0f})"
    return f"{100 * record.value:.1f}{interval}"


def _points(gap: Interval | None) -> str:
    if gap is None:
        return ""
    return f"{100 * gap.value:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _small(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0e}" if abs(value) < 1e-4 else f"{value:.2g}"
