"""The picture of ``hypic bench parallel``. matplotlib draws it, and is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypic_apps.cli.errors import CommandError

# Parts of a cold request, in the order of time: key, name, colour.
PARTS = (
    ("own_ms", "own part", "#4f46e5"),
    ("wait_ms", "wait for others", "#f59e0b"),
    ("rest_ms", "combine", "#10b981"),
)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speedup against workers beside the ideal, where the time of each request goes, and the planner's gain.

    Raises:
        CommandError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise CommandError("matplotlib is missing; install it to draw: pip install matplotlib.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    runs = [run for run in result["runs"] if run.get("even")]
    _draw_speedup(axes[0], runs)
    _draw_parts(axes[1], runs)
    _draw_uneven(axes[2], runs)
    figure.suptitle(f"cold requests over several workers, {result['hardware'].get('gpu') or result['hardware']['cpu']}")
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{path} cannot be written ({reason}); name another file.") from error
    finally:
        pyplot.close(figure)


def _draw_speedup(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for run in runs:
        for shape in dict.fromkeys((r["segments"], r["segment_tokens"]) for r in run["even"]):
            records = [r for r in run["even"] if (r["segments"], r["segment_tokens"]) == shape]
            label = f"{run['geometry']}, {shape[0]} x {shape[1]:,}"
            axis.plot([r["workers"] for r in records], [r["speedup"] for r in records], marker="o", label=label)
    ideal = sorted({r["workers"] for run in runs for r in run["even"]})
    axis.plot(ideal, ideal, color="#9ca3af", linestyle="--", label="ideal")
    axis.set(title="speedup of a cold request", xlabel="workers", xticks=ideal)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)


def _draw_parts(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    bars = [(run["geometry"], r) for run in runs for r in run["even"]]
    names = [f"{name[:12]}\n{r['segments']}x{r['segment_tokens']}, {r['workers']}" for name, r in bars]
    bottoms = [0.0] * len(bars)
    for key, label, colour in PARTS:
        heights = [_part(r, key) for _, r in bars]
        axis.bar(names, heights, bottom=bottoms, label=label, color=colour)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    axis.set(title="where the time goes (geometry, shape, workers)", ylabel="ms (p50)")
    axis.tick_params(axis="x", labelsize=7, rotation=45)
    axis.legend(frameon=False, fontsize=8)


def _part(record: Mapping[str, Any], key: str) -> float:
    if key == "rest_ms":
        return max(float(record["ttft_ms_p50"] - record["own_ms"] - record["wait_ms"]), 0.0)
    return float(record[key])


def _draw_uneven(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    records = [(f"{run['geometry'][:12]}, {r['workers']}", r) for run in runs for r in run.get("uneven", ())]
    names = [name for name, _ in records]
    axis.bar(names, [r["ratio_p50"] for _, r in records], color="#4f46e5")
    possible = [(name, r["ratio_by_tokens"]) for name, r in records if "ratio_by_tokens" in r]
    axis.scatter([name for name, _ in possible], [ratio for _, ratio in possible], marker="_", s=2000, color="#f59e0b")
    axis.axhline(1.0, color="#9ca3af", linestyle="--")
    axis.set(
        title="round robin's time over longest first's (line: if tokens\nwere all that takes time; geometry, workers)"
    )
    axis.tick_params(axis="x", labelsize=7)
