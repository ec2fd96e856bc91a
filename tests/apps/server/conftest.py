"""One checkpoint and one server process for all tests of the server; its steps are short, so that long prompts are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.apps.cli_files import checkpoint
from tests.apps.server.serving import Process, serve


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("served") / "tiny-hybrid")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Process]:
    with serve(str(folder), "--keep-alive", "0.2", "--max-step-tokens", "16") as running:
        yield running
