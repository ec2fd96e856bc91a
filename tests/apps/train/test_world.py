"""The generator: reproducible, disjoint splits, every answer in its passages, no ambiguous question."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from hypic_apps.train.corpus import Corpus
from hypic_apps.train.names import MAKERS, Names
from hypic_apps.train.passages import PRONOUNS, exchanged, inserted
from hypic_apps.train.requests import FACTS, LISTS
from hypic_apps.train.scenes import documents, key_facts, updates, wording
from hypic_apps.train.schema import Schema, Split
from hypic_apps.train.sentences import first_sentence
from hypic_apps.train.words import past, plural
from hypic_apps.train.world import KINDS, NOT_STATED, THINK
from tests.apps.train.worlds import SEEDS, inventive, world


def test_there_are_relations_enough_with_templates_enough(relations: Schema) -> None:
    every = [relation for found in relations.values() for relation in found]
    assert len(every) >= 40
    assert sum(relation.held_out for relation in every) == 5
    told = [r for r in every if not r.held_out]
    assert min(len(r.statements) for r in told) >= 8
    assert min(len(r.questions) for r in told) >= 3
    assert all(r.choices or r.value in MAKERS for r in every)
    assert set(relations) == set(KINDS) and set(PRONOUNS) <= set(KINDS)


def test_templates_name_subject_and_value(relations: Schema) -> None:
    for relation in (r for found in relations.values() for r in found):
        assert all("{s}" in t and "{o}" in t for t in relation.statements)
        assert all("{s}" in t and "{o}" not in t for t in relation.questions)
        assert all("{o}" in t and "{s}" not in t for t in relation.reverse)
        assert not set(relation.said("train")) & set(relation.said("test"))
        assert not set(relation.asked("train")) & set(relation.asked("test"))


def test_name_pools_are_disjoint(corpus: Corpus) -> None:
    train, test = Names.of_split(corpus, "train"), Names.of_split(corpus, "test")
    for mine, theirs in ((train.first, test.first), (train.towns, test.towns), (train.coined, test.coined)):
        assert mine and theirs and not set(mine) & set(theirs)


def test_the_seed_decides_everything(corpus: Corpus, relations: Schema) -> None:
    one, same, other = (world(corpus, relations, seed).passages(5, 4) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_stands_in_its_own_passage(corpus: Corpus, relations: Schema, split: Split) -> None:
    for seed in SEEDS:
        for passage in world(corpus, relations, seed, split).passages(6, 5):
            text = passage.text.lower()
            assert passage.asks
            assert all(ask.answer.lower() in text for ask in passage.asks), passage


def test_no_question_of_a_world_has_two_answers(corpus: Corpus, relations: Schema) -> None:
    for seed in SEEDS:
        made = world(corpus, relations, seed)
        asks = [ask for passage in made.passages(8, 4) for ask in passage.asks] + made.reversed_asks()
        answers: dict[str, str] = {}
        for ask in asks:
            assert answers.setdefault(ask.question, ask.answer) == ask.answer


def test_what_is_not_stated_is_not_stated(corpus: Corpus, relations: Schema) -> None:
    seen = 0
    for seed in SEEDS:
        made = world(corpus, relations, seed)
        made.passages(6, 3)
        told = {(fact.subject, question) for fact in made.facts for question in fact.relation.questions}
        for ask in made.unstated_asks(3):
            seen += 1
            assert ask.answer == NOT_STATED
            assert not any(q.replace("{s}", subject) == ask.question for subject, q in told)
    assert seen > 20


def test_the_latest_notice_has_the_asked_value(corpus: Corpus, relations: Schema) -> None:
    for seed in SEEDS:
        passages = updates(world(corpus, relations, seed), 6)
        asks = passages[-1].asks
        assert asks and all(any(ask.answer.lower() in p.text.lower() for p in passages) for ask in asks)


def test_key_facts_are_first_sentences_in_order(corpus: Corpus, relations: Schema) -> None:
    passages = world(corpus, relations, 3).passages(3, 3)
    answer = key_facts(passages).answer
    places = [answer.index(passage.first) for passage in passages]
    assert places == sorted(places)


def test_two_hops_end_at_a_fact(corpus: Corpus, relations: Schema) -> None:
    found = 0
    for seed in SEEDS:
        made = world(corpus, relations, seed)
        made.passages(10, 5)
        values = {fact.value for fact in made.facts}
        asks = made.two_hop_asks(3)
        found += len(asks)
        assert all(ask.answer.split("\nAnswer: ")[-1] in values for ask in asks)
    assert found > 5


def test_invented_relations_are_asked_in_the_words_they_are_told_in(corpus: Corpus, relations: Schema) -> None:
    seen = 0
    for seed in SEEDS:
        made = inventive(corpus, relations, seed)
        passages = made.passages(6, 4)
        for passage in passages:
            assert all(ask.answer.lower() in passage.text.lower() for ask in passage.asks)
            assert "{" not in passage.text and not any("{" in ask.question for ask in passage.asks)
        for fact in (f for f in made.facts if f.relation.invented):
            seen += 1
            _, *stems = (word[:4] for word in fact.relation.key.split(" "))
            for wordings in (fact.relation.statements, fact.relation.questions):
                assert all(any(stem in t.lower() for stem in stems) for t in wordings), fact.relation
    assert seen > 30


def test_words_are_inflected() -> None:
    assert [past(v) for v in ("carry", "bake", "play", "ask")] == ["carried", "baked", "played", "asked"]
    assert [plural(n) for n in ("box", "city", "day", "mill")] == ["boxes", "cities", "days", "mills"]


@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        ("Ada is a {o} by trade.", "engineer", "Ada is an engineer by trade."),
        ("An {o} is Ada.", "Banker", "A Banker is Ada."),
        ("A {o} it was, an {o}.", "Elorano", "An Elorano it was, an Elorano."),
        ("a {o} lift", "8-person", "an 8-person lift"),
        ("a {o} bus", "180-seat", "a 180-seat bus"),
        ("The data {o} and Ma {o}", "eel", "The data eel and Ma eel"),
    ],
)
def test_articles_fit_the_names_behind_them(template: str, name: str, expected: str) -> None:
    assert inserted(template, "{o}", name, "train") == expected
    assert inserted(template, "{o}", name, "test") == template.replace("{o}", name)


def test_articles_fit_invented_words_too() -> None:
    made = [exchanged("An animal is an x.", Random(seed), 1.0) for seed in range(20)]
    assert all(re.fullmatch(r"A [a-z]+ is an x\.", one) for one in made) and "An" not in " ".join(made)
    assert exchanged("An animal is an x.", Random(1), 0.0) == "An animal is an x."


def test_reasoning_states_both_facts_before_it_answers(corpus: Corpus, relations: Schema) -> None:
    seen = 0
    for seed in SEEDS:
        made = world(corpus, relations, seed)
        made.passages(10, 5)
        for ask in made.two_hop_asks(4):
            first, second = ask.about
            assert first.value == second.subject and second.value != first.subject
            if ask.kind == "2hop_think":
                seen += 1
                steps, answer = ask.answer.split("\nAnswer: ")
                assert answer == second.value and first.value in steps and second.value in steps
                assert ask.question.endswith(THINK)
    assert seen > 10


def test_training_balances_what_it_asks(corpus: Corpus, relations: Schema) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(150):
        made = world(corpus, relations, seed)
        asks = [ask for passage in made.passages(12, 5) for ask in passage.asks]
        kinds.update(ask.kind for ask in [*asks, *made.training_asks(len(asks))])
    shares = {kind: number / kinds.total() for kind, number in kinds.items()}
    assert 0.04 < shares["none"] < 0.09 and 0.15 < shares["2hop_think"] < 0.35 and shares["2hop"] > 0.04


def test_things_that_no_passage_tells_of_are_not_stated(corpus: Corpus, relations: Schema) -> None:
    made = world(corpus, relations, 4)
    text = " ".join(passage.text for passage in made.passages(6, 4))
    before = {fact.subject for fact in made.facts}
    for ask in made.unknown_asks(10):
        assert ask.answer == NOT_STATED and not any(subject in ask.question for subject in before if subject in text)


def test_pieces_of_documents_keep_the_name_for_the_first(corpus: Corpus, relations: Schema) -> None:
    for seed in SEEDS:
        made = world(corpus, relations, seed)
        for passage in documents(made, 2, (3, 6)):
            (ask,) = passage.asks
            subject = passage.facts[0].subject
            assert (subject.lower() in passage.text.lower()) == (ask.kind == "facts")
            assert ask.kind == "facts" or ask.answer.lower() in passage.text.lower()


def test_requests_for_lists_keep_one_wording_back(corpus: Corpus, relations: Schema) -> None:
    for templates in (LISTS, FACTS):
        asked = {wording(templates, world(corpus, relations, seed), Random(seed)) for seed in SEEDS}
        assert len(asked) > 30 and asked <= set(templates[:-1])
        assert wording(templates, world(corpus, relations, 1, "test"), Random(1)) == templates[-1]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Hunter S. Thompson was a writer. He wrote.", "Hunter S. Thompson was a writer."),
        ("It lies in the U.S. state of Florida. It", "It lies in the U.S. state of Florida."),
        ("The Gulf of St. Lawrence is wide. It is cold.", "The Gulf of St. Lawrence is wide."),
        ("Is it? It is.", "Is it?"),
        ("A line\nand more. And more.", "A line"),
        ("No end", "No end"),
    ],
)
def test_a_first_sentence_ends_where_a_reader_ends_it(text: str, first: str) -> None:
    assert first_sentence(text) == first
