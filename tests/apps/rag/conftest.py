"""One engine for all tests of the page: a random model with a byte-level tokenizer, so that tokens are quickly many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from hypic import LLM
from hypic_apps.rag.app import create_app
from hypic_apps.rag.limits import Limits
from hypic_apps.rag.service import About
from tests.apps.cli_files import checkpoint
from tests.apps.rag.talking import Page

SMALL = Limits(file_bytes=20_000, document_chars=9_000, num_documents=6, total_chars=30_000, question_chars=200)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = checkpoint(tmp_path_factory.mktemp("rag") / "tiny-hybrid")
    with LLM(str(folder), threads=1, memory="128MiB", max_context=2048) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> LLM:
    """The engine with an empty cache."""
    engine.forget(everything=True)
    return engine


@pytest.fixture
def page(llm: LLM) -> Iterator[Page]:
    """A page of its own: no documents, no conversations, small limits."""
    with Page(create_app(llm, About("tiny-hybrid answers."), k=4, max_tokens=6, limits=SMALL)) as opened:
        yield opened
