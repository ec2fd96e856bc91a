"""Workers that are started once: for tests that end none of them and ask what nobody asked before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hypic.engine.parallel.wants import Patience
from tests.checkpoints import qwen
from tests.engine.parallel.running import ENCODING, Running, running, until


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("parallel") / "model")


@pytest.fixture(scope="package")
def alone(folder: Path) -> Iterator[Running]:
    """One worker, to compare with."""
    with running(folder, 1) as engine:
        yield engine


@pytest.fixture(scope="package")
def shared(folder: Path) -> Iterator[Running]:
    """Three workers, which may answer whole requests; nobody loses patience because the machine is busy."""
    with running(folder, 3, replace(ENCODING, routes=True, patience=Patience(least_s=30.0))) as engine:
        yield engine


@pytest.fixture
def three(shared: Running) -> Iterator[Running]:
    """The shared workers, which encode for this process and answer nothing themselves; this one holds nothing yet."""
    until(lambda: shared.workers.peers.ready() == 2, 120)
    with shared.asked(routes=False, planner="round-robin"):
        shared.leaked()
        yield shared
