"""Questions in related words: a table out of word vectors, and words that only one fact of a thing is nearest to."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hypic_apps.train import nearness, related
from hypic_apps.train.corpus import Corpus, Gloss
from hypic_apps.train.grammar import enriched, plain
from hypic_apps.train.invented import Inventor
from hypic_apps.train.nearness import Floats, Near, is_form, matrix
from hypic_apps.train.passages import Fact
from hypic_apps.train.related import LEAST, MARGIN, Related
from hypic_apps.train.schema import Relation, Schema
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.world import World
from tests.apps.train.worlds import SEEDS, world

# Of each family: a word that is near all of it, then others, less and less near to the first.
NOUNS = {
    "revenue": ("income", "gain", "revenues"), "lantern": ("lamp", "torch"), "kettle": ("boiler", "pot"),
    "captain": ("skipper", "leader", "captaincy"), "buyer": ("seller", "customer"), "dog": ("cat",),
}  # fmt: skip
VERBS = {"found": ("establish", "form"), "paint": ("decorate", "colour")}
OPPOSITES = frozenset((("buyer", "seller"), ("seller", "buyer")))


def vectors(families: Mapping[str, Sequence[str]]) -> dict[str, Floats]:
    """A direction of its own for every family; its words turn from it further and further."""
    r = np.random.default_rng(5)
    found: dict[str, Floats] = {}
    for first, others in families.items():
        axis = r.normal(size=100)
        for place, word in enumerate((first, *others)):
            aside = r.normal(size=100)
            aside -= axis * (aside @ axis) / (axis @ axis)
            found[word] = np.float32(axis + 0.3 * place * aside * np.linalg.norm(axis) / np.linalg.norm(aside))
    return found


def content(extra: Mapping[str, Floats] | None = None) -> bytes:
    """A file of vectors in the package's form: verbs in their past, each list with two more numbers behind."""
    known = vectors({**NOUNS, "founded": ("established", "formed"), "painted": ("decorated", "coloured")})
    rows = {word: [*map(float, vector), 1.0, 7] for word, vector in {**known, **(extra or {})}.items()}
    return json.dumps({"words": list(rows), "vectors": rows}, separators=(",", ":")).encode()


def files() -> dict[str, str]:
    """WordNet's files for the words, each of one sense of its own; dog and cat are animals."""
    nouns = [word for first, others in NOUNS.items() for word in (first, *others)]
    verbs = [word for first, others in VERBS.items() for word in (first, *others)]
    out = {}
    for part, words, kind, number in (("noun", [*nouns, "Ada"], "04", 1), ("verb", verbs, "40", 2)):
        ids = {word: f"{number}{i:07d}" for i, word in enumerate(words)}
        lines = []
        for word, place in ids.items():
            found = [ids[b] for a, b in OPPOSITES if a == word and b in ids]
            pointers = "".join(f" ! {other} {part[0]} 0101" for other in found)
            called = "05" if word in ("dog", "cat") else kind
            lines.append(f"{place} {called} {part[0]} 01 {word} 0 {len(found):03d}{pointers} | a gloss")
        out[f"dict/data.{part}"] = "\n".join(lines)
        out[f"dict/index.{part}"] = "\n".join(f"{w.lower()} {part[0]} 1 0 1 1 {i}" for w, i in ids.items())
        senses = "".join(f"{w.lower()}%{number}:{kind}:00:: {i} 1 5\n" for w, i in ids.items())
        out["dict/index.sense"] = out.get("dict/index.sense", "") + senses
    return out


@pytest.fixture(scope="module")
def table() -> tuple[Near, ...]:
    return nearness.read(list(nearness.build(content(), files(), frozenset())))


@pytest.fixture(scope="module")
def more(relations: Schema) -> Schema:
    return enriched(relations, Thesaurus(()))


def relation(noun: str, *others: str, value: str = "money") -> Relation:
    nouns = (noun, *others)
    return Relation(
        f"more {noun}", value, (), noun, ("The {n} of {s} is {o}.",), ("What is it?",), invented=True,
        names=frozenset(nouns), nouns=nouns, ways=(("noun", nouns),),
    )  # fmt: skip


def test_the_table_holds_the_nearest_words_and_no_forms_opposites_or_fellows(table: tuple[Near, ...]) -> None:
    words = {(entry.word, entry.pos): entry for entry in table}
    near = {place: [table[i].word for i in entry.nearest] for place, entry in words.items()}
    assert near["revenue", "n"] == ["income", "gain"], "its plural is no word of the table, its neighbours are in order"
    assert near["captain", "n"] == ["skipper", "leader"], "captaincy is a form of it"
    assert near["buyer", "n"] == ["customer"] and near["dog", "n"] == []
    assert near["found", "v"] == ["establish", "form"], "by the vectors of their pasts"
    assert ("revenues", "n") not in words and ("captaincy", "n") in words and ("ada", "n") not in words


def test_words_that_are_names_are_left_out() -> None:
    rows = list(nearness.build(content(), files(), frozenset({"income"})))
    assert "income" not in {row["word"] for row in rows} and "gain" in {row["word"] for row in rows}


def test_cosines_are_those_of_the_vectors(table: tuple[Near, ...]) -> None:
    known = nearness.vectors(content())
    verbs = {"found": "founded", "establish": "established", "form": "formed", "paint": "painted"}
    verbs |= {"decorate": "decorated", "colour": "coloured"}
    exact = nearness.centred(np.array([known[verbs.get(e.word, e.word)] for e in table], np.float32))
    found, tolerance = matrix(table), 0.006
    cosines = exact @ exact.T
    assert np.sqrt(np.mean((found @ found.T - cosines) ** 2)) < tolerance
    assert np.sqrt(np.mean((found @ -found.T - cosines) ** 2)) > 100 * tolerance


def test_a_file_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry like"):
        list(nearness.build(b'{"words": []}', files(), frozenset()))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [("founder", "founding", True), ("own", "owner", True), ("marry", "remarry", True), ("minute", "minutes", True),
     ("wage", "salary", False), ("form", "found", False), ("cat", "education", False)],
    ids=lambda x: str(x),
)  # fmt: skip
def test_forms_of_a_word_are_known(one: str, other: str, alike: bool) -> None:
    assert is_form(one, other) is alike and is_form(other, one) is alike


def test_a_word_is_asked_with_only_where_it_is_nearer_by_the_margin(table: tuple[Near, ...]) -> None:
    words = Related(table)
    own, cosine = relation("revenue"), {w: c for w, _, c in words.near("revenue", "n")}
    assert cosine["income"] > cosine["gain"] >= LEAST
    assert {words.choice(own, [relation("lantern")], Random(i)).word for i in range(30)} == {"income", "gain"}  # type: ignore[union-attr]
    income = next(x for x in words.choices(own) if x.word == "income")
    assert not words.is_nearest(income, [relation("gain")]), "the other is near it too"
    assert words.is_nearest(income, [relation("lantern")]) and not words.is_nearest(income, [relation("income")])
    assert words.choice(own, [relation("income"), relation("gain")], Random(1)) is None
    assert words.near("unheard", "n") == () and words.choice(relation("unheard"), [], Random(1)) is None


@pytest.mark.parametrize(
    ("way", "told", "asked"),
    [("many", "gains", ("income", "n")), ("was in", "formed", ("establish", "v"))],
    ids=["plural", "past"],
)
def test_plurals_and_pasts_are_near_as_their_plain_forms_are(
    table: tuple[Near, ...], way: str, told: str, asked: tuple[str, str]
) -> None:
    words = Related(table)
    other = replace(relation("lantern"), names=frozenset((told,)), noun=told, nouns=(), ways=((way, (told,)),))
    word = related.Choice(*asked, "noun", LEAST)
    assert not words.is_nearest(word, [other])
    assert words.is_nearest(word, [replace(other, ways=())]), "a control: the table has no such form"


def test_relations_that_might_be_meant_by_each_other_are_known(table: tuple[Near, ...]) -> None:
    words = Related(table)
    assert words.are_near(relation("revenue"), relation("income"))
    assert not words.are_near(relation("revenue"), relation("income", value="year"))
    assert not words.are_near(relation("revenue"), relation("lantern"))


def inventive(corpus: Corpus, schema: Schema, table: tuple[Near, ...], seed: int, without: str = "") -> World:
    made = world(corpus, schema, seed)
    glosses = (*corpus.glosses, *(Gloss(f"{g.word}ize", "v", g.text) for g in corpus.glosses))
    made.inventor = Inventor(glosses, (), frozenset({without} - {""}), table)
    return made


def related_asks(made: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Fact, str]]:
    """The related questions of a world's passages, with their facts."""
    found: list[tuple[Fact, str]] = []
    own = related.ask_for

    def noted(w: World, fact: Fact) -> str | None:
        question = own(w, fact)
        found.extend([(fact, question)] if question else [])
        return question

    monkeypatch.setattr(related, "KNOWN", 0.6)  # more than in training, so that a few worlds show many
    monkeypatch.setattr(related, "ask_for", noted)
    asks = [a for p in made.passages(6, 5) for a in p.asks]
    monkeypatch.setattr(related, "ask_for", own)
    assert {q for _, q in found} <= {a.question for a in asks}
    return found


def test_related_questions_ask_for_what_they_are_nearest_to(
    corpus: Corpus, more: Schema, table: tuple[Near, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = rivals = 0
    kept = {plain(t) for found in more.values() for x in found if not x.invented for t in x.asked("test")}
    places = {(entry.word, entry.pos): i for i, entry in enumerate(table)}
    for seed in SEEDS:
        made = inventive(corpus, more, table, seed)
        vectors_of = matrix(table)
        for fact, question in related_asks(made, monkeypatch):
            assert fact.subject.lower() in question.lower() and "{" not in question
            assert plain(question.replace(fact.subject, "{s}")) not in kept
            others = [f.relation for f in made.facts if f.subject == fact.subject and f.relation is not fact.relation]
            told = [places[w, p] for o in others for w in o.names for p in "nv" if (w, p) in places]
            words = [x for x in made.inventor.related.choices(fact.relation) if x.word[:4] in question.lower()]  # type: ignore[union-attr]
            seen, rivals = seen + 1, rivals + bool(told)
            assert any(
                (vectors_of[told] @ vectors_of[places[x.word, x.pos]]).max(initial=-1) <= x.nearness - MARGIN
                for x in words
            )
    assert seen > 100 and rivals > 20


def test_held_out_words_are_never_used(
    corpus: Corpus, more: Schema, table: tuple[Near, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither asked for nor told in; what the schema itself tells so (a captain's statements) is no related word."""
    own = {t for found in more.values() for x in found for t in (*x.statements, *x.more_said)}
    met = {"": 0, "skipper": 0}
    for without in met:
        for seed in SEEDS:
            made = inventive(corpus, more, table, seed, without)
            met[without] += sum("skipper" in q.lower() for _, q in related_asks(made, monkeypatch))
            told = {t for f in made.facts for t in f.relation.statements} - own
            met[without] += sum("skipper" in t for t in told)
    assert met["skipper"] == 0 and met[""] > 5


def test_a_frozen_wording_is_not_asked(corpus: Corpus, more: Schema, table: tuple[Near, ...]) -> None:
    found = next(x for x in more["company"] if x.key == "revenue")
    made = inventive(corpus, more, table, 1)
    assert made.inventor is not None
    fact = Fact("company", "Quell Ltd", found, "3 million euros")
    every = {q for _ in range(400) if (q := made.inventor.related.question(made, fact))}
    assert len(every) > 20 and all("income" in q.lower() or "gain" in q.lower() for q in every)
    frozen = sorted(every)[0].replace("Quell Ltd", "{s}")
    last = replace(found, questions=(*found.questions[:-1], frozen))
    made = inventive(corpus, {**more, "company": (last,)}, table, 1)
    assert made.inventor is not None
    again = {q for _ in range(400) if (q := made.inventor.related.question(made, replace(fact, relation=last)))}
    assert len(again) > 20 and plain(frozen) not in {plain(q.replace("Quell Ltd", "{s}")) for q in again}


def test_facts_told_in_related_words_are_asked_plainly(corpus: Corpus, more: Schema, table: tuple[Near, ...]) -> None:
    found = next(x for x in more["company"] if x.key == "revenue")
    told = 0
    for seed in range(200):
        made = inventive(corpus, more, table, seed)
        (now,) = related.told(made, "company", [found])
        if now is not found:
            told += 1
            assert now.questions == found.questions and now.statements[-2:] == found.statements[-2:]
            assert all("income" in t or "gain" in t for t in map(str.lower, now.said("train")))
            assert made.inventor is not None and made.inventor.related.choices(now) == ()
    assert 3 < told < 40


def test_handbooks_and_worlds_for_measuring_have_no_related_words(
    corpus: Corpus, more: Schema, table: tuple[Near, ...]
) -> None:
    found = next(x for x in more["company"] if x.key == "revenue")
    made = inventive(corpus, more, table, 1)
    assert made.inventor is not None
    assert made.inventor.related.question(made, Fact("handbook", "Quell Ltd", found, "3 euros")) is None
    made.split = "test"
    assert all(related.ask_for(made, Fact("company", "Quell Ltd", found, "3 euros")) is None for _ in range(50))


def test_an_archive_without_the_table_is_refused(corpus: Corpus, table: tuple[Near, ...], tmp_path: Path) -> None:
    path = tmp_path / "corpus.tar.xz"
    parts = asdict(replace(corpus, near=table))
    _write(path, parts)
    assert Corpus.load(path).near == table
    _write(path, {name: rows for name, rows in parts.items() if name != "near"})
    with pytest.raises(ValueError, match="no table of near words; make it anew: python -m hypic_apps.train data"):
        Corpus.load(path)


def _write(path: Path, parts: Mapping[str, Sequence[object]]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, rows in parts.items():
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            info = tarfile.TarInfo(f"{name}.jsonl")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
