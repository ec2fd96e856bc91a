"""Engines with slots for steps ahead, and a count of what they launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from hypic.engine.chain import Chain
from hypic.engine.runner import Runner
from tests.engine.ahead.asking import Make
from tests.engine.harness import Bench
from tests.engine.recorded import with_recorded_steps


@pytest.fixture
def make(bench: Make) -> Make:
    def made(name: str, num_ahead: int, path: str = "plain", **settings: Any) -> Bench:
        dtype, kernels = ("float64", "off") if path == "plain" else ("float32", "on")
        found = bench(name, dtype, num_ahead=num_ahead, kernels=kernels, **settings)
        found.watched.is_noting = False
        if path == "recorded":
            found.engine.runner = with_recorded_steps(found.engine.runner)
        return found

    return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each step had that was launched ahead."""
    seen, launch = list[int](), Runner.launch

    def counted(self: Runner, chains: Sequence[Chain], ids: Tensor | None = None) -> Any:
        if ids is not None:
            seen.append(len(chains))
        return launch(self, chains, ids)

    monkeypatch.setattr(Runner, "launch", counted)
    return seen
