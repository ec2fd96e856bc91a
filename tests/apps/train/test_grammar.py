"""Wordings for training: out of phrases and synonyms, none of them kept for measuring, all asking for what is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from hypic_apps.eval import pool
from hypic_apps.train import thesaurus
from hypic_apps.train.frames import NOUN_ASKED, filled
from hypic_apps.train.grammar import FOLDER, Phrases, enriched, kept_back, parsed, plain, verb, wordings
from hypic_apps.train.invented import Inventor
from hypic_apps.train.names import MAKERS
from hypic_apps.train.passages import label
from hypic_apps.train.schema import Relation, Schema, Split
from hypic_apps.train.thesaurus import Entry, Thesaurus
from hypic_apps.train.words import article, is_regular, past, present_participle, third

ENTRIES = (
    Entry("author", "n", ("writer",), ("maker",), (), True),
    Entry("price", "n", (), ("cost",), (), True),
    Entry("own", "v", ("possess",), ("have",), (("owner", "n"), ("ownership", "n")), True),
    Entry("teach", "v", ("instruct",), (), (("teacher", "n"),), True),
    Entry("field", "n", ("area",), (), (), False),
)


@pytest.fixture(scope="module")
def more(relations: Schema) -> Schema:
    return enriched(relations, Thesaurus(ENTRIES))


def test_every_trained_relation_has_phrases_and_held_out_ones_have_none(relations: Schema, more: Schema) -> None:
    for kind, found in relations.items():
        for relation, richer in zip(found, more[kind], strict=False):
            assert relation.key == richer.key and richer.statements[-len(relation.statements) :] == relation.statements
            assert richer.questions[0] == relation.questions[0]  # it shows the article
            assert richer.said("test") == relation.said("test") and richer.asked("test") == relation.asked("test")
            assert richer.asked_back("test") == relation.asked_back("test")
            assert bool(richer.more_said and richer.more_asked) == (not relation.held_out)
    known = {(kind, x.key) for kind, found in relations.items() for x in found if not x.held_out}
    assert {place for place, _ in parsed(FOLDER / "known.txt")} == known


def test_cards_call_facts_by_other_nouns_in_training_alone(more: Schema) -> None:
    founder = next(x for x in more["company"] if x.key == "founder")
    splits: tuple[Split, Split] = ("train", "test")
    trained, measured = ({label(founder, split, Random(seed)) for seed in range(400)} for split in splits)
    assert measured == {founder.noun}
    assert trained == {founder.noun, *founder.nouns} and len(trained) > 2


def test_no_wording_that_is_kept_for_measuring_is_made(more: Schema) -> None:
    frozen = [x for found in pool.load().schema.values() for x in found]
    kept = {plain(t) for x in frozen for t in (*x.said("test"), *x.asked("test"), *x.asked_back("test"))}
    made = [x for found in more.values() for x in found if not x.held_out]
    every = {plain(t) for x in made for t in (*x.more_said, *x.more_asked)}
    every |= {plain(t) for x in made for t in (*x.said("train"), *x.asked("train"), *x.asked_back("train"))}
    assert len(every) > 20_000 and len(kept) > 200
    assert not every & kept


def test_kept_wordings_are_dropped_where_phrases_would_make_them(relations: Schema) -> None:
    founder = next(x for x in relations["company"] if x.key == "founder")
    made = "Who is the originator of {s}?"
    assert any(made in x.more_asked for x in enriched(relations, Thesaurus(()))["company"])
    kept = {**relations, "company": (_with_last_question(founder, made),)}
    assert plain(made) in kept_back(kept)
    assert not any(made in x.more_asked for x in enriched(kept, Thesaurus(()))["company"])


def _with_last_question(relation: Relation, question: str) -> Relation:
    return replace(relation, questions=(*relation.questions, question))


def test_wordings_have_their_places_and_no_others(more: Schema) -> None:
    for relation in (x for found in more.values() for x in found if not x.held_out):
        said = relation.statements if relation.invented else relation.more_said
        asked = relation.questions if relation.invented else relation.more_asked
        assert all(t.count("{s}") >= 1 and t.count("{o}") == 1 and t.count("{") == t.count("{s}") + 1 for t in said)
        assert all("{s}" in t and t.count("{") == t.count("{s}") for t in asked)
        assert relation.choices or relation.value in MAKERS


def test_new_relations_do_not_go_by_names_of_held_out_ones(relations: Schema, more: Schema) -> None:
    held_out = {x.noun for found in relations.values() for x in found if x.held_out}
    for relation in (x for found in more.values() for x in found if x.invented):
        assert not held_out & relation.names, relation.key


def test_phrases_are_read_and_lines_of_another_form_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("# note\n@company\nowner person: owner, holder | by: own, buy:bought:bought\n", encoding="utf-8")
    ((place, phrases),) = parsed(path)
    assert place == ("company", "owner person")
    assert phrases == Phrases(("owner", "holder"), (("by", ("own", "buy:bought:bought")),))
    said, asked = wordings("person", phrases, "")
    assert "{o} bought {s}." in said and "Who owned {s}?" in asked and "Who is the holder of {s}?" in asked
    path.write_text("@company\nowner, holder\n", encoding="utf-8")
    with pytest.raises(ValueError, match="'owner, holder'"):
        list(parsed(path))
    with pytest.raises(ValueError, match="no way 'with'"):
        wordings("person", Phrases(("owner",), (("with", ("own",)),)), "")


def test_verbs_keep_what_follows_them() -> None:
    assert verb("pay for:paid for:paid for")["{es}"] == "pays for" and verb("look after")["{ed}"] == "looked after"
    assert verb("write:wrote:written")["{en}"] == "written"


def test_words_are_exchanged_in_the_form_they_stand_in() -> None:
    words = Thesaurus(ENTRIES)
    assert list(words.reworded("The authors of {s} owned an author.")) == [
        "The writers of {s} owned an author.",
        "The authors of {s} possessed an author.",
        "The authors of {s} owned a writer.",
    ]
    assert words.others("field") == () and words.others("taught") == () and words.others("teaches") == ()


def test_forms_of_words() -> None:
    assert [past(v) for v in ("stop", "admit", "offer", "look", "prefer")] == [
        "stopped", "admitted", "offered", "looked", "preferred",
    ]  # fmt: skip
    assert [present_participle(v) for v in ("bake", "run", "see", "carry")] == [
        "baking",
        "running",
        "seeing",
        "carrying",
    ]
    assert third("carry") == "carries" and article("honour") == "an" and article("university") == "a"
    assert not is_regular("write") and not is_regular("overtake") and is_regular("paint")


DATA_NOUN = """  1 a line of the licence
00000001 04 n 02 price 0 terms 0 001 @ 00000002 n 0000 | what is asked for something
00000002 04 n 02 cost 0 outlay 0 000 | what is paid
00000003 18 n 01 owner 0 000 | one who owns
"""
DATA_VERB = "00000009 40 v 02 own 0 possess 0 001 + 00000003 n 0101 01 + 08 00 | have\n"
INDEX_NOUN = (
    "price n 1 1 @ 1 1 00000001\ncost n 1 0 1 1 00000002\noutlay n 1 0 1 0 00000002\nowner n 1 0 1 1 00000003\n"
)
INDEX_VERB = "own v 1 1 + 1 1 00000009\npossess v 1 1 + 1 1 00000009\n"
INDEX_SENSE = """price%1:04:00:: 00000001 1 9
cost%1:04:00:: 00000002 1 5
outlay%1:04:00:: 00000002 1 0
owner%1:18:00:: 00000003 1 3
own%2:40:00:: 00000009 1 7
possess%2:40:00:: 00000009 1 2
"""


def test_the_thesaurus_is_read_from_files_in_wordnets_form() -> None:
    files = {"dict/data.noun": DATA_NOUN, "dict/index.noun": INDEX_NOUN, "dict/index.sense": INDEX_SENSE}
    files |= {"dict/data.verb": DATA_VERB, "dict/index.verb": INDEX_VERB}
    found = {entry.word: entry for entry in thesaurus.read(list(thesaurus.build(files)))}
    assert found["price"] == Entry("price", "n", (), ("cost",), (), True)
    assert found["own"] == Entry("own", "v", ("possess",), (), (("owner", "n"),), True)
    assert found["possess"].same == ("own",) and found["possess"].made == ()
    assert "outlay" not in found and "cost" not in found


def test_invented_relations_are_asked_for_in_words_of_their_own() -> None:
    inventor = Inventor((), ENTRIES, frozenset({"author"}))
    assert [noun for noun, _ in inventor.known_nouns] == ["price", "field"]
    inventor.nouns, inventor.verbs = ["lantern"], ["paint"]
    pairs = set()
    for seed in range(200):
        made = inventor.relation(Random(seed), "the ", "person")
        told, asked = " ".join(made.statements), " ".join(made.questions)
        assert made.invented and all("{o}" in t and "the {s}" in t.replace("The", "the") for t in made.statements)
        pairs |= {
            (a, b)
            for a in ("price", "own", "lantern")
            for b in ("cost", "owner", "lantern")
            if a in told and b in asked
        }
    assert pairs >= {("price", "cost"), ("own", "owner"), ("lantern", "lantern")}


def test_frames_keep_open_places() -> None:
    assert filled(NOUN_ASKED[0], {"{n}": "age"}) == "What is the age of {s}?"
