"""The evaluation sets: the same everywhere, unseen in training, answerable, and about what they say they are about."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest

from hypic_apps.eval import pool, sets
from hypic_apps.eval.items import Item, digest
from hypic_apps.train import schema, wordings
from hypic_apps.train.corpus import held_out
from hypic_apps.train.names import coined
from hypic_apps.train.requests import FACTS, LISTS
from hypic_apps.train.scenes import DESCRIPTIONS
from hypic_apps.train.world import NOT_STATED

SMOKE = Path(__file__).parents[2] / "data" / "eval_smoke.json.xz"


@pytest.fixture(scope="module")
def made() -> dict[str, list[Item]]:
    return {name: sets.of(name, pool.load(), 200) for name in sets.NAMES}


def committed_size(name: str) -> int:
    """How many items a set holds, as committed."""
    return int(json.loads(Path(sets.__file__).with_name("hashes.json").read_text())[name]["num_items"])


@pytest.mark.parametrize("name", sets.NAMES)
def test_full_sets_have_their_committed_hashes(name: str) -> None:
    items = sets.of(name, pool.load())
    assert digest(items) == sets.hashes()[name]
    assert digest(items[:-1]) != sets.hashes()[name]
    assert len(items) == sets.size(name) == committed_size(name)


def test_the_smoke_sets_are_the_first_200_items(made: dict[str, list[Item]]) -> None:
    frozen = pool.read(SMOKE)
    assert set(frozen) == set(sets.NAMES)
    for name, items in made.items():
        assert frozen[name] == [_plain(item) for item in items]


def _plain(item: Item) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(item).items()}


def test_an_item_depends_on_its_number_alone(made: dict[str, list[Item]]) -> None:
    for name in sets.NAMES:
        assert sets.of(name, pool.load(), 3) == made[name][:3]


def bare(wordings: Iterable[str]) -> set[str]:
    """Wordings without case and punctuation."""
    return {" ".join(re.findall(r"[a-z{}']+", text.lower())) for text in wordings}


def test_no_wording_and_no_name_of_the_sets_is_trained_on() -> None:
    trained = [x for relations in schema.load().values() for x in relations if not x.held_out]
    written = wordings.load().values()
    said = {t for x in trained for t in x.said("train")} | {t for x in written for t in x.statements}
    asked = {t for x in trained for t in (*x.asked("train"), *x.asked_back("train"))}
    asked |= {t for x in written for t in (*x.questions, *x.reverse)}
    frozen = [x for relations in pool.load().schema.values() for x in relations]
    assert len(frozen) >= 80
    for relation in frozen:
        assert not bare(relation.said("test")) & bare(said) and len(relation.statements) == 2
        assert not bare((*relation.asked("test"), *relation.asked_back("test"))) & bare(asked)
    assert not set(pool.load().names.coined) & set(coined("train"))
    assert all(held_out(article.title) for article in pool.load().library.articles)
    assert LISTS[-1] not in LISTS[:-1] and FACTS[-1] not in FACTS[:-1]


@pytest.mark.parametrize("name", ["S1", "S2-direct", "S2-think", "S4", "S5", "S6", "S8", "S10"])
def test_answers_stand_in_the_gold_passages(name: str, made: dict[str, list[Item]]) -> None:
    for item in made[name]:
        if item.answers == (NOT_STATED,):
            assert not item.gold
            continue
        text = " ".join(item.passages[number] for number in item.gold).lower()
        assert item.gold and item.answers[0].lower() in text, item


def test_two_hops_need_two_passages_and_name_only_the_first_thing(made: dict[str, list[Item]]) -> None:
    for item in made["S2-direct"] + made["S2-think"]:
        assert len(item.gold) == 2 and len(item.passages) == 10
    assert all("Answer:" in item.question for item in made["S2-think"])
    assert not any("Answer:" in item.question for item in made["S2-direct"])


def test_places_of_the_gold_passage_are_even(made: dict[str, list[Item]]) -> None:
    places = Counter(item.gold[0] // 4 for item in made["S1"])
    assert set(places) == {0, 1, 2, 3} and max(places.values()) < 80


def test_pieces_of_documents_name_their_subject_only_at_first(made: dict[str, list[Item]]) -> None:
    for item in made["S4-list"]:
        first, *others = (item.passages[n] for n in item.gold)
        # What is asked about stands in the question and in the first piece.
        subject = next(w for w in item.question.rstrip(".").split(" about ", 1)[-1:])
        if subject.lower() in first.lower():
            assert not any(subject.lower() in text.lower() for text in others), item
    assert set(DESCRIPTIONS) <= set(pool.load().schema)


def test_the_latest_notice_stands_behind_the_others(made: dict[str, list[Item]]) -> None:
    for item in made["S5"]:
        assert len(item.passages) == 12 and min(len(text) for text in item.passages) > 100
        assert item.answers[0].lower() in item.passages[item.gold[-1]].lower()


def test_half_of_the_refusals_are_answerable(made: dict[str, list[Item]]) -> None:
    unstated = sum(item.answers == (NOT_STATED,) for item in made["S6"])
    assert 80 <= unstated <= 120


def test_descriptions_are_no_copies(made: dict[str, list[Item]]) -> None:
    for item in made["S8"]:
        described = item.question.split(": ", 1)[1].rstrip("?").lower()
        assert described not in item.passages[item.gold[0]].lower()


def test_items_by_the_place_of_their_one_passage() -> None:
    found = {name: sets.of(name, pool.load(), 40) for name in ("S8", "S2-direct", "S6")}
    placed = sets.by_place(found)
    assert list(placed)[:8] == [f"S8 place {n}" for n in range(1, 9)] and not any("S2" in name for name in placed)
    assert sum(len(items) for name, items in placed.items() if "S8" in name) == 40
    for name, items in placed.items():
        assert {item.gold for item in items} == {(int(name.split()[-1]) - 1,)}
    assert sum(len(items) for name, items in placed.items() if "S6" in name) == sum(bool(i.gold) for i in found["S6"])


def test_sweeps_have_the_numbers_and_lengths_they_name() -> None:
    by_number = sets.sweep("segments", (4, 64), pool.load(), 2)
    assert [len(item.passages) for items in by_number.values() for item in items] == [4, 4, 64, 64]
    for name, items in sets.sweep("lengths", (64, 1024), pool.load(), 3).items():
        wanted = 4 * int(name.split()[-1])
        assert all(len(text) > 0.7 * wanted for item in items for text in item.passages)


def test_calls_can_be_made_from_what_is_given(made: dict[str, list[Item]]) -> None:
    for item in made["S9"]:
        assert len(item.kinds) == len(item.passages) and {"tool", "skill", "memory"} <= set(item.kinds)
        assert len(item.gold) == 3


def listed(answer: str) -> list[str]:
    """The items of a numbered list."""
    starts = [answer.index(f"({number}) ") for number in range(1, 9) if f"({number}) " in answer]
    return [answer[start + 4 : stop].strip() for start, stop in zip(starts, [*starts[1:], len(answer)], strict=True)]


def test_first_sentences_are_asked_in_the_order_of_the_passages(made: dict[str, list[Item]]) -> None:
    """Each stands in the passage of its number; a control: not in that of the number behind."""
    right, shifted = 0, 0
    for item in made["S3"]:
        sentences = listed(item.answers[0])
        assert len(sentences) == len(item.passages)
        right += sum(map(str.__contains__, item.passages, sentences))
        shifted += sum(map(str.__contains__, item.passages[1:], sentences))
    total = sum(len(item.passages) for item in made["S3"])
    assert right == total > 1000 and shifted < 0.05 * total
