"""A tiny checkpoint, an ``LLM`` that a module shares, and one for a test alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypic import LLM
from tests.checkpoints import add_tokenizer, qwen
from tests.llm.asking import SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("llm"))
    add_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as made:
        yield made
