"""Times on a GPU: medians of graph replays over inputs too many for the cache, and what a large copy moves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _event_s(run: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Of single runs, after three that are not counted."""
    for _ in range(3):
        run()
    return statistics.median(_event_s(run) for _ in range(repeats))


def replayed_s(runs: Sequence[Callable[[], object]], repeats: int) -> float:
    """Seconds per run: all runs in one captured graph, each on inputs of its own, over their number."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return median_s(graph.replay, repeats) / len(runs)


def copy_bytes_per_s(repeats: int) -> float:
    """Bytes read and written by a copy of 2 GiB of random numbers within the device."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), repeats)
