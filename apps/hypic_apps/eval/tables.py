"""Records as Markdown: arms by sets with intervals, what reuse costs, and drift by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypic_apps.eval.arms import FULL, MAIN, note
from hypic_apps.eval.drift import DISTANCES, Drift
from hypic_apps.eval.grading import PRIMARY
from hypic_apps.eval.records import Record
from hypic_apps.eval.sets import CALLS, SETS
from hypic_apps.eval.statistics import Interval, mean_of

Key = tuple[str, str, str]
# The sets whose mean gap is the main figure: those that no order or reference across passages decides.
MEANT = ("S1", "S3", "S6", "S7", "S8")
# Of the default policy, in shares: the mean gap, the end of its interval, and the gap on one set.
MEAN_GOAL, MEAN_GOAL_LOW, WORST_GOAL = 0.005, 0.012, 0.02
TOO_FEW = "by its value; too few items to say"
# Of full recompute, by set and metric, in shares: what the bundled model was to answer.
ANSWERED = (
    ("S1", "exact_match", 0.95), ("S2-think", "exact_match", 0.80), ("S3", "rouge_l", 0.90),
    ("S6", "refusal_precision", 0.85), ("S6", "refusal_recall", 0.85),
)  # fmt: skip
# Arms that no one would run: ways of composing that are wrong on purpose, and controls.
ABLATIONS = ("addition", "last", "no-rotation", "no-passages", "gold-removed")
SHORT = {"exact_match": "exact match", "rouge_l": "ROUGE-L", "tool": "right tool"}


def by_key(records: Sequence[Record]) -> Mapping[Key, Record]:
    """Records by set, arm and metric."""
    return {(r.set, r.arm, r.metric): r for r in records}


def primary(name: str) -> str:
    """The metric by which a set is told."""
    return PRIMARY[SETS[name].form] if name in SETS else "tool" if name == CALLS else "exact_match"


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


def divergences(records: Sequence[Record]) -> list[str]:
    """Arms by sets: the divergence of next tokens from full recompute's, in nats."""
    found, sets = by_key(records), _names(records, "set")
    told = {arm: [found.get((name, arm, "kl")) for name in sets] for arm in _names(records, "arm")}
    rows = {arm: [_small(None if r is None else r.value) for r in row] for arm, row in told.items() if any(row)}
    return _filled("divergence from full", sets, rows)


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
    full_s, rows = _mean(records, FULL, "floor_s"), dict[str, list[str]]()
    for arm in _names(records, "arm"):
        means = {name: _mean(records, arm, name) for name in ("agreement", "first_token", "kl", "run_share", "ttft_s")}
        cells = [_percent(means["agreement"]), _percent(means["first_token"]), _small(means["kl"])]
        kept, floor_s = (_mean(records, arm, name) for name in ("cached_bytes", "floor_s"))
        cells += [_percent(means["run_share"]), _percent(_mean(records, arm, "encoded_share"))]
        cells += ["" if kept is None else f"{kept / 2**20:.1f} MiB"]
        cells += ["" if means["ttft_s"] is None else f"{1000 * means['ttft_s']:.0f} ms"]
        cells += ["" if not full_s or floor_s is None else _percent(floor_s / full_s)]
        rows[arm] = [*cells, note(arm)]
    return _filled("arm", [*heads, "what it is"], rows)


def others(records: Sequence[Record]) -> list[str]:
    """Every further metric of quality: arms by set and metric."""
    found = by_key(records)
    kept = ("f1", "fact_recall", "refusal_precision", "refusal_recall", "arguments", "rule")
    columns = [(name, m) for name in _names(records, "set") for m in kept if (name, "full", m) in found]
    lines = _head("arm", [f"{name}: {metric.replace('_', ' ')}" for name, metric in columns])
    for arm in _names(records, "arm"):
        lines.append(f"| {arm} | {' | '.join(_share(found.get((name, arm, m))) for name, m in columns)} |")
    return lines if columns else []


def knobs(records: Sequence[Record]) -> list[str]:
    """Of one set, what every arm is away from full recompute and what it costs. An arm whose prompt is another one
    also shows what that prompt does in full."""
    lines = _head("knob", ["gap, points", "KL", "run", "encoded", "kept", "at best"])
    found, (name, *_) = by_key(records), _names(records, "set")
    full = found.get((name, FULL, "floor_s"))
    for arm in (arm for arm in _names(records, "arm") if not arm.startswith(FULL)):
        of = {m: found.get((name, arm, m)) for m in ("kl", "run_share", "encoded_share", "cached_bytes", "floor_s")}
        values = {metric: None if record is None else record.value for metric, record in of.items()}
        own, kept, floor_s = found.get((name, f"full-{arm}", primary(name))), values["cached_bytes"], values["floor_s"]
        gap = _points(apart(found.get((name, arm, primary(name)))))
        gap += "" if own is None or own.gap_to_full is None else f"; its own full {100 * own.gap_to_full:+.1f}"
        cells = [gap, _small(values["kl"]), _whole(values["run_share"]), _whole(values["encoded_share"])]
        cells += ["" if kept is None else f"{kept / 2**20:.0f} MiB"]
        cells += ["" if full is None or floor_s is None else _whole(floor_s / full.value)]
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def closer(records: Sequence[Record]) -> list[str]:
    """Of several sets, what every arm is away from full recompute in answers and in likeness."""
    found, sets = by_key(records), _names(records, "set")
    lines = _head("knob", [f"{name}, {part}" for name in sets for part in ("gap", "KL")])
    for arm in (arm for arm in _names(records, "arm") if not arm.startswith(FULL)):
        cells = []
        for name in sets:
            kl = found.get((name, arm, "kl"))
            cells += [_points(apart(found.get((name, arm, primary(name))))), _small(None if kl is None else kl.value)]
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return lines


def models(records: Sequence[Record]) -> list[str]:
    """Sets by models: full recompute and the default policy in per cent, the gap between them in points and the KL."""
    names, parts = _names(records, "model"), ("full", "default", "gap, points", "KL")
    found = {name: by_key([r for r in records if r.model == name]) for name in names}
    lines = _head("set", [f"{name}: {part}" for name in names for part in parts])
    for one in _names(records, "set"):
        lines.append(f"| {one} | {' | '.join(cell for name in names for cell in _default(found[name], one))} |")
    return lines


def _default(found: Mapping[Key, Record], name: str) -> list[str]:
    """What one model's default policy gives on one set, beside full recompute."""
    full, default, kl = (
        found.get((name, *key)) for key in ((FULL, primary(name)), (MAIN, primary(name)), (MAIN, "kl"))
    )
    return [_share(full), _share(default), _points(apart(default)), _small(None if kl is None else kl.value)]


def answers(records: Sequence[Record]) -> list[str]:
    """The model itself, by full recompute, against what it was to answer."""
    found, lines = by_key(records), _head("goal of full recompute", ["measured", "met"])
    for name, metric, least in ANSWERED:
        if (record := found.get((name, FULL, metric))) is not None:
            told = f"{SHORT.get(metric, metric.replace('_', ' '))} of at least {100 * least:.0f}"
            lines.append(f"| {name}: {told} | {_share(record)} (n={record.n}) | {_yes(record.value >= least)} |")
    return lines


def goals(records: Sequence[Record], arm: str = MAIN) -> list[str]:
    """A policy, if not told otherwise the default one, against its goals: half a point in the mean over ``MEANT`` with
    at most 1.2 by the interval, two points on each; elsewhere the gap, and the arm that halves it for the fewest
    tokens."""
    found, sets = by_key(records), _names(records, "set")
    gap_of = {name: gap for name in sets if (gap := apart(found.get((name, arm, primary(name))))) is not None}
    meant = [name for name in gap_of if name in MEANT]
    lines = _head("goal", ["measured", "met"])
    if meant:
        mean = mean_of([gap_of[name] for name in meant])
        is_met = mean.value >= -MEAN_GOAL and mean.low >= -MEAN_GOAL_LOW
        lines.append(f"| mean gap of {', '.join(meant)} at most {100 * MEAN_GOAL:.1f} points, by its interval at most "
                     f"{100 * MEAN_GOAL_LOW:.1f} | {_points(mean)} | {_yes(is_met)} |")  # fmt: skip
    for name in meant:
        gap = gap_of[name]
        is_met, is_sure = gap.value >= -WORST_GOAL, gap.low >= -WORST_GOAL
        told = TOO_FEW if is_met and not is_sure else _yes(is_met)
        lines.append(f"| {name}: gap at most {100 * WORST_GOAL:.0f} points | {_points(gap)} | {told} |")
    for name in (name for name in gap_of if name not in MEANT):
        lines.append(_halved(records, name, gap_of[name]))
    return lines


def _halved(records: Sequence[Record], name: str, gap: Interval) -> str:
    """Whether an arm halves a set's gap, and the one that does it for the fewest tokens of a request."""
    found = by_key(records)
    arms = [arm for arm in _names(records, "arm") if arm not in ABLATIONS and not arm.startswith(FULL)]
    costs: dict[str, float] = {}
    for arm in arms:
        other, run = apart(found.get((name, arm, primary(name)))), found.get((name, arm, "run_share"))
        if other is not None and run is not None and 2 * other.value >= gap.value:
            costs[arm] = run.value
    best = min(costs, key=lambda arm: costs[arm], default=None)
    told = "no arm" if best is None else f"`{best}` at {_whole(costs[best])} of the tokens run"
    met = "no gap" if gap.value >= 0 else _yes(best is not None)
    return f"| {name}: the gap, {_points(gap)}, halved by a knob | {'' if gap.value >= 0 else told} | {met} |"


def ends(found: Sequence[Drift]) -> list[str]:
    """The error of the state in the first and the deepest linear layer, and of hidden states behind the last layer."""
    lines = _head("arm", ["state, first linear layer", "state, deepest linear layer", "hidden states, last layer"])
    for one in found:
        states = [layer.state for layer in one.layers if layer.state is not None]
        cells = [_small(states[0] if states else None), _error(states[-1] if states else None)]
        lines.append(f"| {one.arm} | {' | '.join([*cells, _error(one.layers[-1].hidden)])} |")
    return lines


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


def _filled(first: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """A table without the columns that nothing stands in."""
    used = [n for n in range(len(heads)) if any(row[n] for row in rows.values())]
    lines = _head(first, [heads[n] for n in used])
    return [*lines, *(f"| {name} | {' | '.join(row[n] for n in used)} |" for name, row in rows.items())]


def _mean(records: Sequence[Record], arm: str, metric: str) -> float | None:
    values = [r.value for r in records if r.arm == arm and r.metric == metric]
    return sum(values) / len(values) if values else None


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _error(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %" if value >= 1e-3 else _small(value)


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
