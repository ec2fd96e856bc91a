"""Forgetting texts that are cached in several parts: exactly what holds the whole text goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypic import LLM, Policy, Segment
from tests.checkpoints import add_tokenizer, qwen
from tests.test_forgetting import SECRET, SETTINGS, asked, holds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("forgetting"))
    add_tokenizer(made)
    return made


def with_seams(llm: LLM, *texts: str) -> None:
    """Ask for texts that are cached in parts, each under a source of its own."""
    policy = Policy(seam_every=12, seam=4, min_segment_tokens=0)
    for number, text in enumerate(texts):
        asked(llm, Segment(text, source=f"{number}.md"), policy=policy)


@pytest.mark.parametrize("store", [None, "host://64MiB"])
def test_a_text_in_parts_is_forgotten_and_others_that_begin_like_it_are_not(folder: Path, store: str | None) -> None:
    alike = SECRET + " The key hangs behind the stove, under the hat of the miller's brother."
    other = SECRET + " The well is deep, and the rope is too short for all but one of the pails."
    with LLM(str(folder), **SETTINGS, store=store) as llm:
        with_seams(llm, alike, other)
        assert holds(llm, alike) and holds(llm, other)
        llm.forget(source="0.md")
        assert not holds(llm, alike) and holds(llm, other)
        with_seams(llm, alike, other, SECRET)
        llm.forget(source="2.md")  # the beginning of both, as a whole text: it stands in them
        assert not holds(llm, alike) and not holds(llm, other) and not holds(llm, SECRET)
