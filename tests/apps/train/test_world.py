"""The generator: reproducible, disjoint splits, every answer in its passages, no ambiguous question."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest

from hypic_apps.train.clues import clue, is_only, missing_clue
from hypic_apps.train.corpus import Corpus, Gloss
from hypic_apps.train.grammar import enriched
from hypic_apps.train.invented import Inventor
from hypic_apps.train.names import MAKERS, Names
from hypic_apps.train.passages import PRONOUNS, table
from hypic_apps.train.requests import FACTS, LISTS
from hypic_apps.train.scenes import documents, key_facts, updates, wording
from hypic_apps.train.schema import Schema, Split
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.variety import UNINVENTED, is_alike, lacking, mention, missing, roster
from hypic_apps.train.words import past, plural
from hypic_apps.train.world import KINDS, NOT_STATED, THINK, World

SEEDS = range(60)


def world(corpus: Corpus, relations: Schema, seed: int, split: Split = "train") -> World:
    return World(Names.of_split(corpus, split), relations, split, Random(seed), ("A plain sentence.",))


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


def inventive(corpus: Corpus, relations: Schema, seed: int) -> World:
    made = world(corpus, relations, seed)
    made.inventor = Inventor((*corpus.glosses, *(Gloss(f"{g.word}ize", "v", g.text) for g in corpus.glosses)))
    return made


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
