"""Pictures of results. matplotlib draws them, and is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypic_apps.cli.errors import CommandError

Record = Mapping[str, Any]
COLOURS = {
    "full": "#6b7280", "prefix": "#b45309", "cold": "#0369a1", "warm": "#15803d", "transformers": "#7c3aed"
}  # fmt: skip
LABELS = {
    "full": "full recompute", "prefix": "prefix cache", "cold": "segments, cold", "warm": "segments, warm"
}  # fmt: skip


def ttft(records: Sequence[Record], path: Path) -> None:
    """TTFT against the number of segments and against their length: the longest and the most, where there are several.

    Raises:
        CommandError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _pyplot()
    length, many = (max(r[name] for r in records) for name in ("segment_tokens", "num_segments"))
    panels = [
        ("num_segments", "number of segments", {"segment_tokens": length}, f"segments of {length:,} tokens"),
        ("segment_tokens", "tokens of a segment", {"num_segments": many}, f"{many} segments"),
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (field, label, fixed, title) in zip(axes, panels, strict=True):
        chosen = [r for r in records if all(r[name] == value for name, value in fixed.items())]
        for arm in dict.fromkeys(r["arm"] for r in chosen):
            _line(axis, arm, sorted((r for r in chosen if r["arm"] == arm), key=lambda r: float(r[field])), field)
        axis.set(xlabel=label, title=title, xscale="log", yscale="log")
        values = sorted({r[field] for r in chosen})
        axis.set_xticks(values, [f"{value:,}" for value in values], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time to first token, ms (p50; bar to p90)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(0.91, 0.5), frameon=False)
    figure.suptitle(f"{records[0]['geometry']} on {records[0]['device']}")
    _write(figure, path)


def _line(axis: Any, arm: str, found: Sequence[Record], field: str) -> None:
    xs, p50 = [r[field] for r in found], [r["ttft_ms_p50"] for r in found]
    above = [r["ttft_ms_p90"] - r["ttft_ms_p50"] for r in found]
    colour = COLOURS.get(arm)
    axis.errorbar(xs, p50, yerr=[[0] * len(xs), above], marker="o", capsize=3, color=colour, label=LABELS.get(arm, arm))
    if arm in ("full", "warm"):
        floors = [r["floor_ms"] for r in found]
        axis.plot(xs, floors, linestyle=":", color=colour, label=f"floor of {LABELS[arm]}")


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CommandError("plots need matplotlib; install it: pip install 'hypic[bench]'.") from error
    return pyplot


def _write(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{path} cannot be written ({reason}); name another file, such as ttft.png.") from error


def load(records: Sequence[Record], objective_s: float, path: Path) -> None:
    """p90 of TTFT against requests per second, a line for each arm, with the objective.

    Raises:
        CommandError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for arm in dict.fromkeys(r["arm"] for r in records):
        found = sorted((r for r in records if r["arm"] == arm), key=lambda r: float(r["qps"]))
        axis.plot([r["qps"] for r in found], [r["ttft_ms_p90"] for r in found], marker="o", label=arm,
                  color=COLOURS.get({"none": "full", "segments": "warm"}.get(arm, arm)))  # fmt: skip
    axis.axhline(1e3 * objective_s, linestyle=":", color="#111827", label=f"objective of {objective_s:g} s")
    axis.set(xlabel="requests a second", ylabel="time to first token, ms (p90)", xscale="log", yscale="log")
    for numbered in (axis.xaxis, axis.yaxis):
        for put in (numbered.set_major_formatter, numbered.set_minor_formatter):
            put(lambda value, _: f"{value:g}")
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    _write(figure, path)
