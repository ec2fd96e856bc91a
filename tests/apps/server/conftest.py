"""One checkpoint and one server process for all tests of the server; short steps make its long prompts slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.cli_files import checkpoint
from tests.apps.server.serving import Process, serve


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("served") / "tiny-hybrid")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Process]:
    # In float64 equal prompts give equal tokens, whatever was cached.
    flags = ("--keep-alive", "0.2", "--max-step-tokens", "10", "--dtype", "float64")
    with serve(str(folder), *flags) as running:
        yield running
        assert running.stop() == (0, ""), "a server that is told to stop says nothing and ends with 0"
