"""Worlds of further relations: clues, other words, and what is lacking, each answered in one way."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from hypic_apps.train.clues import clue, is_only, missing_clue
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.grammar import enriched
from hypic_apps.train.names import coined
from hypic_apps.train.passages import table
from hypic_apps.train.schema import Schema
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.variety import MORE, UNINVENTED, is_alike, lacking, longer, mention, missing, names_of, roster
from hypic_apps.train.world import NOT_STATED, World
from tests.apps.train.worlds import SEEDS, inventive, world


@pytest.fixture(scope="module")
def more(relations: Schema) -> Schema:
    return enriched(relations, Thesaurus(()))


def rich(corpus: Corpus, more: Schema, seed: int) -> World:
    made = inventive(corpus, more, seed)
    assert made.inventor is not None
    return made


def test_a_clue_is_enough_to_tell_the_fact_from_others_of_its_thing(corpus: Corpus, more: Schema) -> None:
    only = others = asked = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        for passage in made.passages(6, 5):
            wordings = {q.replace("{s}", f.subject) for f in passage.facts for q in f.relation.questions}
            asked += sum(a.question not in wordings for a in passage.asks)
        for fact in made.facts:
            same = [f for f in made.facts if f.subject == fact.subject and f.relation.value == fact.relation.value]
            if is_only(made, fact):
                only += 1
                assert len(same) == 1 or fact.relation.choices
            others += len(same) > 1
    assert only > 300 and others > 100 and asked > 300


def test_what_a_clue_asks_for_in_vain_is_not_told_of_the_thing(corpus: Corpus, more: Schema) -> None:
    seen = 0
    words = {"who": ("who", "whom", "person"), "when": ("when", "day", "year", "month", "time"), "how long": ("long",)}
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        made.passages(6, 4)
        for kind, subject in sorted({(f.kind, f.subject) for f in made.facts if f.kind not in UNINVENTED}):
            found = missing_clue(made, kind, subject, made.relations(kind))
            own = {clue(f.relation.value) for f in made.facts if f.subject == subject}
            if found is None:
                continue
            seen += 1
            assert subject.lower() in found.lower() and "{" not in found
            rest = set(found.lower().replace(subject.lower(), "").rstrip(".?").split())
            for told in own & set(words):
                assert rest.isdisjoint(words[told]), (found, own)
    assert seen > 100


def test_what_is_told_in_any_words_is_asked_in_its_own(corpus: Corpus, more: Schema) -> None:
    known = {(kind, x.key): x for kind, found in more.items() for x in found}
    disguised = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        facts = [fact for kind in ("company", "city") for fact in made.thing(kind, 5)]
        for fact in (f for f in facts if (f.kind, f.relation.key) in known):
            own = known[fact.kind, fact.relation.key]
            assert fact.relation.questions == own.questions
            if fact.relation.statements != own.statements:
                disguised += 1
                assert own.invented or set(fact.relation.said("train")).isdisjoint(own.said("test"))
                assert all("{o}" in t and "{s}" in t for t in fact.relation.said("train"))
                same = [f for f in facts if f.subject == fact.subject and f.relation.value == fact.relation.value]
                assert len(same) == 1 or fact.relation.choices
    assert 20 < disguised < 100


def test_rich_worlds_answer_every_question_in_one_way(corpus: Corpus, more: Schema) -> None:
    further = rosters = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        answers: dict[str, str] = {}
        for passage in made.passages(8, 5):
            rosters += len({fact.subject for fact in passage.facts if fact.kind not in UNINVENTED}) > 1
            further += sum(fact.relation.key.startswith("more ") for fact in passage.facts)
            for ask in passage.asks:
                assert ask.answer.lower() in passage.text.lower(), passage
                assert answers.setdefault(ask.question, ask.answer) == ask.answer, ask
    assert further > 100 and rosters > 20


def test_relations_of_one_thing_are_told_apart_by_their_names(corpus: Corpus, more: Schema) -> None:
    same_kind = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        facts = made.thing("company", 5)
        for one, other in itertools.combinations([fact.relation for fact in facts], 2):
            assert not is_alike(one, other)
            same_kind += one.value == other.value
    assert same_kind > 40


def test_what_a_thing_might_be_said_to_have_is_not_asked_as_missing(corpus: Corpus, more: Schema) -> None:
    hard = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        made.passages(6, 4)
        for kind, subject in sorted({(f.kind, f.subject) for f in made.facts if f.kind not in UNINVENTED}):
            own = [f.relation for f in made.facts if f.subject == subject]
            free = [x for x in made.relations(kind) if x.key not in {o.key for o in own}]
            for relation in missing(made, kind, subject, free):
                assert not any(is_alike(relation, o) for o in own)
                hard += relation.key in {f.relation.key for f in made.facts if f.kind == kind}
    assert hard > 50


def test_what_a_thing_lacks_is_what_another_of_its_kind_has(corpus: Corpus, more: Schema) -> None:
    seen = strange = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        made.passages(8, 5)
        for kind, subject in sorted({(f.kind, f.subject) for f in made.facts if f.kind not in UNINVENTED}):
            own = [f.relation for f in made.facts if f.subject == subject]
            others = {f.relation.key for f in made.facts if f.kind == kind and f.subject != subject}
            known = {x.key: x for x in made.relations(kind)}
            odd = {x.value for x in own if x.invented or x.statements != known[x.key].statements}
            strange += len(odd)
            for relation in lacking(made, kind, subject):
                seen += 1
                assert not relation.invented and relation.key in others and relation.value not in odd
                assert relation.key not in {x.key for x in own}
    assert seen > 200 and strange > 100


def test_what_a_thing_lacks_is_asked_plainly(corpus: Corpus, more: Schema) -> None:
    seen = 0
    for seed in SEEDS:
        made = rich(corpus, more, seed)
        made.passages(8, 5)
        subjects = {f.subject: f.kind for f in made.facts if f.kind not in ("task", "handbook")}
        found = made.lacked_asks(3)
        seen += len(found)
        assert len(found) <= 3
        for ask in found:
            forms = {
                q.replace("{s}", subject)
                for subject, kind in subjects.items()
                if subject in ask.question
                for x in lacking(made, kind, subject)
                for q in x.asked("train")
            }
            assert ask.answer == NOT_STATED and ask.question in forms
    assert seen > 100


def test_tables_and_mentions_name_their_things(corpus: Corpus, more: Schema) -> None:
    made = rich(corpus, more, 3)
    passage = roster(made, "company")
    assert len({fact.subject for fact in passage.facts}) >= 2 and len(passage.asks) == len(passage.facts)
    lines = table(passage.facts, Random(1)).split("\n")
    assert len(lines) == 1 + len({fact.subject for fact in passage.facts})
    text = mention(made)
    assert any(fact.subject in text for fact in made.facts)


def test_worlds_for_measuring_stay_as_they_were(corpus: Corpus, relations: Schema, more: Schema) -> None:
    for seed in range(8):
        plain = world(corpus, relations, seed, "test")
        richer = world(corpus, more, seed, "test")
        richer.schema = {k: tuple(x for x in found if not x.invented) for k, found in richer.schema.items()}
        assert [p.text for p in plain.passages(6, 5)] == [p.text for p in richer.passages(6, 5)]
        asks = [[(a.question, a.answer) for a in w.extra_asks()] for w in (plain, richer)]
        assert asks[0] == asks[1]


def test_names_of_crowded_worlds_share_parts_or_go_on_from_another(corpus: Corpus, relations: Schema) -> None:
    counts = {True: [0, 0], False: [0, 0]}
    for seed in SEEDS:
        for is_crowded, found in counts.items():
            made = world(corpus, relations, seed)
            made.is_crowded = is_crowded
            made.passages(8, 4)
            names = sorted({n for f in made.facts for n in names_of(f, "person")})
            pairs = [(a, b) for a in names for b in names if a != b]
            found[0] += any(b.startswith(a) for a, b in pairs)
            found[1] += any(a.split()[0] == b.split()[0] for a, b in pairs)
    for alike, plain in zip(counts[True], counts[False], strict=True):
        assert alike > 10 and alike > 3 * plain  # the control: elsewhere such names are rare


def test_names_that_go_on_are_none_that_are_kept() -> None:
    kept = set(coined("test"))
    assert kept and not any(name.endswith(MORE) for name in kept)
    assert longer("Velmark Tools", "company", Random(1)).endswith(" Tools")
    assert longer("Ann Tolm", "person", Random(1)).startswith("Ann Tolm")
