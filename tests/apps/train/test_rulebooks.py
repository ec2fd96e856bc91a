"""Rulebooks: every answer in its section, one meaning a question, rivals of a kind, nothing of the demo's documents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from hypic_apps.corpus import company, questions
from hypic_apps.eval import pool
from hypic_apps.train import measures, rules
from hypic_apps.train.corpus import Corpus, Gloss
from hypic_apps.train.grammar import enriched, plain
from hypic_apps.train.invented import Inventor
from hypic_apps.train.names import MAKERS, Names, coined
from hypic_apps.train.passages import Passage
from hypic_apps.train.render import Encoder
from hypic_apps.train.rows import STAGES, Rows
from hypic_apps.train.rulebooks import KIND, NAME_AFTER, VALUE_LISTS, Rulebooks
from hypic_apps.train.rules import PLACE, Rule, Rules, plural_of, put_in
from hypic_apps.train.schema import Schema
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.world import NOT_STATED, World

SEEDS = range(80)


@pytest.fixture(scope="module")
def known() -> Rules:
    return rules.load()


@pytest.fixture(scope="module")
def books(corpus: Corpus, relations: Schema, known: Rules) -> list[list[Passage]]:
    return [Rulebooks(known).passages(world(corpus, relations, seed), 1 + seed % 6) for seed in SEEDS]


def world(corpus: Corpus, relations: Schema, seed: int) -> World:
    glosses = (*corpus.glosses, *(Gloss(f"{g.word}ize", "v", g.text) for g in corpus.glosses))
    made = World(Names.of_split(corpus, "train"), relations, "train", Random(seed), ("A plain sentence.",))
    made.inventor = Inventor(glosses)
    return made


def every(known: Rules) -> list[Rule]:
    return [rule for found in known.by_topic.values() for rule in found]


def test_rules_have_all_their_values_and_known_words(known: Rules) -> None:
    own = {"fee", "person", "the_place", *VALUE_LISTS}
    assert len(every(known)) > 55 and set(known.by_topic) == set(known.headings)
    for rule in every(known):
        slots = {f"{{{letter}}}" for letter in "abc"[: len(rule.values)]}
        assert all(kind in own or kind in measures.MAKERS or kind in MAKERS for kind in rule.values), rule.key
        assert set("abc"[: len(rule.values)]) >= set(rule.asked)
        for template in rule.said:
            assert ({"{a}"} if rule.key == "pets" else slots) <= set(re.findall(r"\{[abc]\}", template)), template
        for slot, asked in rule.asked.items():
            assert len(asked) >= 2 and all(f"{{{slot}}}" not in template for template in asked), rule.key
        for _, name in PLACE.findall(" ".join((*rule.said, *(q for found in rule.asked.values() for q in found)))):
            assert {name.lower(), name.lower().removesuffix("s")} & set(known.words), name


def test_words_are_put_in_as_the_place_says() -> None:
    words = {"item": "hour of riding", "tickets": "old tokens"}
    assert put_in("<A item>, <items>, <Tickets>", words) == "An hour of riding, hours of riding, Old tokens"
    assert plural_of("canoe") == "canoes"


def test_every_answer_stands_in_its_section(books: list[list[Passage]]) -> None:
    for passage in (p for book in books for p in book):
        assert not re.search(r"[{}<>]|\.m\.\.", passage.text), passage.text
        for ask in passage.asks:
            assert not re.search(r"[{}<>]", ask.question)
            assert ask.answer == NOT_STATED or ask.answer.lower() in passage.text.lower(), (ask, passage.text)


def test_no_question_of_a_context_has_two_answers(books: list[list[Passage]]) -> None:
    unanswered = 0
    for book in books:
        answers: dict[str, str] = {}
        for ask in (a for p in book for a in p.asks):
            assert answers.setdefault(ask.question, ask.answer) == ask.answer, ask
            unanswered += ask.answer == NOT_STATED
    assert 10 < unanswered < 40


def test_sections_hold_several_values_of_a_kind_and_name_no_subject(books: list[list[Passage]]) -> None:
    kinds = [Counter(f.relation.value for f in p.facts) for book in books for p in book]
    assert sum(max(counts.values()) >= 3 for counts in kinds) > len(kinds) / 4
    asks = [a for book in books for p in book for a in p.asks if a.kind == "1hop"]
    assert all(a.about[0].kind in (KIND, "handbook") for a in asks)
    named = sum(a.about[0].subject.lower() in a.question.lower() for a in asks)
    assert 0 < named < len(asks) / 4


def test_some_sections_have_headings_and_some_have_none(books: list[list[Passage]], known: Rules) -> None:
    heads = re.compile("|".join(re.escape(h) for found in known.headings.values() for h in found))
    headed = [bool(heads.search(p.text.split("\n")[0][:40])) for book in books for p in book[1:]]
    assert len(headed) / 2 < sum(headed) < len(headed)


def test_one_sentence_may_state_who_and_when(corpus: Corpus, relations: Schema, known: Rules) -> None:
    began = tuple(x for x in known.by_topic["intro"] if x.key == "began")
    only = replace(known, by_topic={"intro": began, "money": known.by_topic["money"]})
    both = 0
    for seed in SEEDS:
        for passage in Rulebooks(only).passages(world(corpus, relations, seed), 2):
            about = {f.relation.key: f.value for f in passage.facts if f.relation.key.startswith("rule began")}
            if about:
                both += 1
                assert {"rule began a", "rule began b", "rule began c"} == set(about)
                line = next(s for s in re.split(r"(?<=[.])\s", passage.text) if about["rule began a"] in s)
                assert about["rule began b"] in line
    assert both > 20


def test_later_passages_of_a_chat_tell_no_rule_anew(corpus: Corpus, relations: Schema, known: Rules) -> None:
    num_asked = 0
    for seed in range(25):
        told, answers = set[str](), dict[str, str]()
        for part in range(4):
            made = world(corpus, relations, 100 * seed + part)
            for ask in (a for p in Rulebooks(known).passages(made, 4, told) for a in p.asks):
                num_asked += 1
                assert answers.setdefault(ask.question, ask.answer) == ask.answer, ask
    assert num_asked > 2000


def test_the_same_seed_gives_the_same_book(corpus: Corpus, relations: Schema, known: Rules) -> None:
    one, same, other = (Rulebooks(known).passages(world(corpus, relations, seed), 3) for seed in (1, 1, 2))
    assert one == same and one != other


def test_many_questions_on_one_fact_name_no_subject(corpus: Corpus, relations: Schema, encoder: Encoder) -> None:
    rows, stage = Rows(corpus, relations, encoder), STAGES[3]
    impersonal = total = 0
    for seed in range(150):
        r = Random(seed)
        kind = r.choices(("world", "natural", "mixed"), (5.5, 1.6, 2.0))[0]
        _, asks = rows.context(kind, r.randint(*stage.passages), stage, r)
        for ask in (a for a in asks if a.kind == "1hop"):
            total += 1
            fact = ask.about[0]
            impersonal += fact.kind in (KIND, "handbook") and fact.subject.lower() not in ask.question.lower()
    assert 0.08 < impersonal / total < 0.24


def test_the_last_statement_and_question_of_a_rule_are_for_measuring(
    corpus: Corpus, relations: Schema, known: Rules
) -> None:
    rule = known.by_topic["money"][0]
    assert not set(rule.told("train")) & set(rule.told("test"))
    assert not set(rule.asked_for("a", "train")) & set(rule.asked_for("a", "test"))
    only = Rulebooks(replace(known, by_topic={"intro": known.by_topic["intro"], "money": (rule,)}))
    trained, measured = world(corpus, relations, 1), world(corpus, relations, 1)
    measured.split = "test"
    last = ".+".join(map(re.escape, re.split(r"<[^>]+>|\{a\}", rule.said[-1])))
    for made, is_last in ((trained, False), (measured, True)):
        text = " ".join(p.text for p in only.passages(made, 3))
        assert bool(re.search(last, text)) == is_last, text


def clauses() -> set[str]:
    """Sentences and clauses of the demo's company documents, without their last mark."""
    prose = " ".join(re.sub(r"^#.*$", "", document.text, flags=re.M) for document in company())
    sentences = re.split(r"(?<=[.;])\s+", prose)
    parts = (part for sentence in sentences for part in (sentence, *re.split(r"[,;] (?:and )?", sentence)))
    return {part.strip().rstrip(".;") for part in parts if part.strip()}


def without_name(template: str) -> re.Pattern[str]:
    """What a wording of a handbook looks like where the house is not named, whatever its value."""
    bare = re.sub(r"^At \{s\},? ", "", NAME_AFTER.sub("", template)).rstrip(".?")
    return re.compile(re.sub(r"\\\{[a-z]\\\}", ".+", re.escape(bare)), re.IGNORECASE)


def meets(templates: Iterable[str], texts: Iterable[str]) -> set[tuple[str, str]]:
    texts = list(texts)
    return {(t, text) for t in templates for text in texts if without_name(t).fullmatch(text)}


def test_nothing_of_the_demos_documents_is_trained_on(relations: Schema, known: Rules) -> None:
    texts, asked = clauses(), {q.question.rstrip("?") for q in questions()}
    assert meets(["The core hours of {s} begin at {o}."], texts), "the comparison finds what stands there"
    for relation in enriched(relations, Thesaurus(()))["handbook"]:
        assert not meets((*relation.said("train"), *relation.more_said), texts)
        unnamed = [t for t in (*relation.asked("train"), *relation.more_asked) if not t.startswith("{s} ")]
        assert not meets(unnamed, asked)
    bare = [rule for rule in every(known) if not rule.has_words]
    assert not meets((t for rule in bare for t in rule.said), texts)
    assert not meets((q for rule in bare for found in rule.asked.values() for q in found), asked)
    assert "Norvale" not in coined("train") + coined("test")


def test_no_word_of_a_rule_stands_in_the_demos_documents(known: Rules) -> None:
    prose = " ".join(document.text.lower() for document in company())
    nouns = {
        word for name, found in known.words.items() if name not in ("done", "handled") for w in found for word in w
    }
    assert len(nouns) > 600
    assert {word for word in nouns if re.search(rf"\b{re.escape(word.lower())}\b", prose)} == set()


def test_no_rule_is_worded_like_the_sets_for_measuring(known: Rules) -> None:
    frozen = [x for found in pool.load().schema.values() for x in found]
    kept = {plain(NAME_AFTER.sub("", t)) for x in frozen for t in (*x.said("test"), *x.asked("test"))}
    slots = re.compile(r"\{[abc]\}")
    made = {slots.sub("{o}", t) for x in every(known) for t in (*x.said, *(q for f in x.asked.values() for q in f))}
    assert not kept & {plain(NAME_AFTER.sub("", t)) for t in made}
