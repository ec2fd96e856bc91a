"""What tests of engines with several tiers share: stores as text, engines that load, a disk that is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypic.engine.store.disk import DiskTier
from tests.engine.harness import Bench
from tests.engine.prompts import seg

Make = Callable[..., Bench]
MODELS = ["qwen", "minimax", "minimax-partial"]
SEGMENT = seg(40, 1)


def disk_at(path: Path, size: str = "64MiB") -> str:
    return f"disk://{path}?size={size}"


def always_load(engine: Bench) -> Bench:
    """On tiny models encoding is mostly cheaper; these tests are of what is loaded."""
    engine.engine.tiers.costs.encode.see = lambda units, seconds: None  # type: ignore[method-assign]
    engine.engine.tiers.costs.encode.unit_s = 1e3
    return engine


def saved(engine: Bench) -> Bench:
    while engine.engine.tend():
        pass
    assert engine.engine.tiers.writer.drain(30.0)
    return engine


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tiers_of(answer: Any) -> list[str | None]:
    return [segment.tier for segment in answer.report.segments if segment.outcome == "hit"]


def evicted(engine: Bench) -> None:
    """As when memory is short: everything idle goes the way of an eviction."""
    engine.store.demote_all()
    assert engine.store.stats.num_entries == 0


class Slow(DiskTier):
    """A disk that takes its time until ``go`` is set."""

    def __init__(self, *args: Any) -> None:
        self.go = threading.Event()
        super().__init__(*args)

    def put(self, key: bytes, buffer: Tensor) -> bool:
        self.go.wait(30.0)
        return super().put(key, buffer)

    def get(self, key: bytes) -> Tensor | None:
        self.go.wait(30.0)
        return super().get(key)


def slowed(engine: Bench, path: Path) -> Slow:
    slow = Slow(path, 2**26, engine.engine.runner.identity)
    engine.engine.tiers.tiers = (slow,)
    return slow
