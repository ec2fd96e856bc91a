"""Checkpoints and engines that many tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from tests.engine.expected import Checkpoints
from tests.engine.harness import Bench
from tests.engine.recorded import SETTINGS, with_recorded_steps


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(lambda name: tmp_path_factory.mktemp(name))


@pytest.fixture
def bench(checkpoints: Checkpoints) -> Callable[..., Bench]:
    """``bench(name, dtype, **settings)``: a fresh engine, with an empty pool, on a model that is loaded once."""

    def make(name: str = "qwen", dtype: str = "float64", **settings: object) -> Bench:
        return Bench(checkpoints.runner(name, dtype), **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Runner]:
    """``load(name, kernels)``: a runner of its own; with ``kernels="on"`` its small steps go through buckets."""
    known = Checkpoints(lambda name: tmp_path_factory.mktemp(name))

    def loaded(name: str, kernels: str) -> Runner:
        config = EngineConfig(**SETTINGS, max_running=8, kernels=kernels)
        runner = Runner.load(known.folder(name), config)
        return with_recorded_steps(runner) if kernels == "on" else runner

    return loaded
