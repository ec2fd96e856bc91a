"""A checkpoint, a store on disk, and one with entries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypic import Segment
from tests.checkpoints import add_tokenizer, qwen
from tests.saved.keeping import OTHER, SECRET, opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("saved"))
    add_tokenizer(made)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def filled(folder: Path, root: Path) -> Iterator[Path]:
    """Three entries of two texts; the secret is alice's, and everybody's."""
    with opened(folder, root) as llm:
        llm.warm([Segment(SECRET, name="code", source="door.md", namespace="alice"), Segment(SECRET, source="door.md")])
        llm.warm([Segment(OTHER, name="river", source="river.md", ttl_s=3600)])
        llm.flush()
    yield root
