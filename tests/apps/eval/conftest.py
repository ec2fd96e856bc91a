"""A tiny float64 model to be measured; its states decay slowly, so that a wrong one shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypic.config import EngineConfig
from hypic_apps.eval.driver import Subject
from hypic_apps.eval.items import Item
from tests.checkpoints import add_tokenizer, qwen

SETTINGS = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048, "max_running": 4}
WORDS = "the river runs past an old mill where three brothers grind rye and oats for the town below".split()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("eval"))
    add_tokenizer(made)
    return made


@pytest.fixture
def subject(folder: Path) -> Subject:
    return Subject(str(folder), EngineConfig.of(**SETTINGS))


def passage(seed: int) -> str:
    return f"Passage {seed}: " + " ".join(WORDS[(seed * 7 + i * (seed + 1)) % len(WORDS)] for i in range(30))


@pytest.fixture
def item() -> Item:
    passages = tuple(passage(seed) for seed in (1, 2, 3))
    return Item("T", 0, passages, "Who grinds rye?", ("three brothers",), (1,))
