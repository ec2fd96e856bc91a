"""The picture of ``hypic bench parallel``. matplotlib draws it, and is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypic_apps.cli.errors import CommandError


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speedup against workers beside the ideal, and where the time of the most workers goes.

    Raises:
        CommandError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise CommandError("matplotlib is missing; install it to draw: pip install matplotlib.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    by_shape: dict[str, list[Any]] = {}
    for record in result["even"]:
        by_shape.setdefault(f"{record['segments']} x {record['segment_tokens']:,}", []).append(record)
    for name, records in by_shape.items():
        counts = [r["workers"] for r in records]
        left.plot(counts, [r["speedup"] for r in records], marker="o", label=name)
        right.plot(counts, [r["ttft_ms_p50"] for r in records], marker="o", label=f"{name}: cold request")
        right.plot(counts, [r["combine_ms"] for r in records], linestyle=":", label=f"{name}: combine")
    ideal = sorted({r["workers"] for r in result["even"]})
    left.plot(ideal, ideal, color="#9ca3af", linestyle="--", label="ideal")
    left.set(xlabel="workers", ylabel="speedup of a cold request")
    right.set(xlabel="workers", ylabel="ms (p50)", yscale="log")
    for axis in (left, right):
        axis.set_xticks(ideal)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(f"{result['geometry']}, {result['hardware'].get('gpu') or result['hardware']['cpu']}")
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be written ({error}); name another file.") from error
    finally:
        pyplot.close(figure)
