"""Checkpoints and engines that many tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.expected import Checkpoints
from tests.engine.harness import Bench


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(lambda name: tmp_path_factory.mktemp(name))


@pytest.fixture
def bench(checkpoints: Checkpoints) -> Callable[..., Bench]:
    """``bench(name, dtype, **settings)``: a fresh engine, with an empty pool, on a model that is loaded once."""

    def make(name: str = "qwen", dtype: str = "float64", **settings: object) -> Bench:
        return Bench(checkpoints.runner(name, dtype), **settings)  # type: ignore[arg-type]

    return make
