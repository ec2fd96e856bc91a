"""Wordings that were written out: their file, where they go, and that none of them is malformed."""

from __future__ import annotations

import bz2
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from hypic_apps.train import wordings
from hypic_apps.train.grammar import enriched, kept_back, plain
from hypic_apps.train.names import MAKERS
from hypic_apps.train.schema import Schema, choices_of
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.wordings import Block


@pytest.fixture(scope="module")
def blocks() -> Mapping[tuple[str, str], Block]:
    return wordings.load()


def test_every_wording_has_its_places_once(blocks: Mapping[tuple[str, str], Block]) -> None:
    total = 0
    for block in blocks.values():
        for texts, places in ((block.statements, (1, 1)), (block.questions, (1, 0)), (block.reverse, (0, 1))):
            assert all((t.count("{s}"), t.count("{o}")) == places for t in texts)
            assert not any(re.search(r"\{(?![so]\})", t) for t in texts)
            assert len(set(texts)) == len(texts)
            total += len(texts)
    assert total > 5000


def test_they_are_of_relations_that_there_are_or_tell_all_of_a_new_one(
    relations: Schema, blocks: Mapping[tuple[str, str], Block]
) -> None:
    known = {(kind, x.key) for kind, found in relations.items() for x in found if not x.held_out}
    for place, block in blocks.items():
        if place in known:
            assert not block.value and not block.noun
        else:
            assert place[0] in relations and block.noun and block.statements and block.questions
            assert block.value in MAKERS or len(choices_of(block.value)) > 10


def test_none_is_kept_for_measuring(relations: Schema, blocks: Mapping[tuple[str, str], Block]) -> None:
    kept = kept_back(relations)
    written = {plain(t) for b in blocks.values() for t in (*b.statements, *b.questions, *b.reverse)}
    assert not written & kept
    assert plain(relations["person"][0].questions[-1]) in kept  # the control: such a one would be found


def test_training_says_and_asks_them(relations: Schema, blocks: Mapping[tuple[str, str], Block]) -> None:
    richer = {(kind, x.key): x for kind, found in enriched(relations, Thesaurus(())).items() for x in found}
    for (kind, key), block in blocks.items():
        relation = richer[kind, f"written {key}" if block.value else key]
        assert set(block.statements) <= set(relation.said("train")) and set(block.questions) <= set(
            relation.asked("train")
        )
        assert relation.invented == bool(block.value)


@pytest.mark.parametrize("text", ["= {s} is {o}.", "@person [job]\n* {s}", "@person job", ""])
def test_a_line_of_another_form_is_refused_with_its_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "w.bz2").write_bytes(bz2.compress(text.encode()))
    with pytest.raises(ValueError, match=re.escape(text.splitlines()[-1] if text else "''")):
        wordings.load(tmp_path / "w.bz2")


def test_a_block_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.bz2").write_bytes(bz2.compress(b"@person [job]\n= {s} is {o}.\n@person [job]\n? What is {s}?"))
    with pytest.raises(ValueError, match=re.escape("have '@person [job]' twice; write one block")):
        wordings.load(tmp_path / "w.bz2")
