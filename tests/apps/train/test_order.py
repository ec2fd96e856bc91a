"""Requests for lists and questions on order: many wordings, none held out; right by another way; weights in place."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from hypic.checkpoints import bundled
from hypic_apps.train import order
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.exam import Papers
from hypic_apps.train.names import Names
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.render import Emphasis, Encoder, Turn, Weights, conversation
from hypic_apps.train.requests import FACTS, LISTS, VERBS, bare, numbered, of_split, strung
from hypic_apps.train.rows import LISTED_IN_ORDER, LONG_ANSWERS, STAGES, Rows, Stage
from hypic_apps.train.scenes import documents, key_facts
from hypic_apps.train.schema import Schema
from hypic_apps.train.world import World

HELD_OUT = {
    "lists": "Write down the first sentence of every passage.",
    "facts": "Write down all that is said about {s}.",
}
KINDS = {
    "lists": LISTS, "facts": FACTS, "sentence": order.SENTENCE, "words": order.WORDS, "every": order.EVERY,
    "end": order.AT_END, "behind": order.BEHIND, "before": order.BEFORE,
}  # fmt: skip
NUMBER = re.compile(r"\d|\b(number|count|how many|(first|second|third|fourth|last but one) (passage|text|of the))\b")
QUOTED = re.compile(r'"(.+?)(?: \.\.\.)?"')


@pytest.fixture(scope="module")
def vocabulary() -> Encoder:
    return Encoder(Tokenizer.from_file(str(bundled() / "tokenizer.json")))


def passages_of(corpus: Corpus, relations: Schema, seed: int, number: int) -> list[Passage]:
    world = World(Names.of_split(corpus, "train"), relations, "train", Random(seed), ("A plain sentence.",))
    return world.passages(number, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_wording_occurs_twice_and_the_last_is_kept(kind: str) -> None:
    wordings = KINDS[kind]
    assert len({bare(text) for text in wordings}) == len(wordings)
    assert of_split(wordings, "test") == wordings[-1:] and wordings[-1] not in of_split(wordings, "train")


@pytest.mark.parametrize("kind", HELD_OUT)
def test_requests_for_lists_are_many_and_none_holds_the_one_held_out(kind: str) -> None:
    wordings = KINDS[kind]
    trained = [bare(text) for text in wordings[:-1]]
    wanted = bare(HELD_OUT[kind]).removeprefix("write down ")
    assert wordings[-1] == HELD_OUT[kind] and 60 <= len(trained) <= 150
    assert not any(wanted in text for text in trained)  # not even what it asks for, with another verb
    assert any(bare("Write down") in text for text in trained) and wanted in bare(wordings[-1])
    assert all(any(verb.lower() in text for text in trained) for verb in VERBS)
    every = [text for other in KINDS.values() for text in other[:-1]]
    assert not any(bare(HELD_OUT[kind]) in bare(text) for text in every)


def looked_up(question: str, texts: Sequence[str]) -> str:
    """The answer, from the question's words and the texts alone."""
    asked = QUOTED.sub("", question)
    number = re.search(r"\b(three|four|five)\b", asked)
    length = {"three": 3, "four": 4, "five": 5}[number.group()] if number else 0
    if re.search(r"\b(each|every|all)\b|do the passages begin", asked):
        return " ".join(f"({i}) {' '.join(text.split()[:length])}" for i, text in enumerate(texts, 1))
    place = placed(question, texts)
    return " ".join(texts[place].split()[:length]) if length else texts[place]


def placed(question: str, texts: Sequence[str]) -> int:
    """Which passage a question points at."""
    quote, asked = QUOTED.search(question), QUOTED.sub("", question)
    if quote is not None:
        words = quote.group(1).split()
        (found,) = [i for i, text in enumerate(texts) if text.split()[: len(words)] == words]
        before = re.search(r"\bbefore\b|\bfollowed by\b|\bprecedes\b", asked)
        behind = re.search(r"\bafter\b|\bfollows\b|\bbehind\b|\bfollowing\b", asked)
        return found - 1 if before else found + 1 if behind else found
    assert re.search(r"\b(last|final)\b|very end", asked), question
    return len(texts) - 1


def agrees(ask: Ask, texts: Sequence[str]) -> bool:
    """Whether another look at the texts gives the same answer; of a first sentence only that the text begins so."""
    found = looked_up(ask.question, texts)
    return found.startswith(ask.answer) if ask.kind == "order_sentence" else found == ask.answer


def test_questions_on_order_are_right(corpus: Corpus, relations: Schema) -> None:
    seen: Counter[str] = Counter()
    wrong = total = 0
    for seed in range(120):
        r = Random(seed)
        passages = passages_of(corpus, relations, seed, 1 + seed % 12)
        texts = [p.text for p in passages]
        for ask in order.asks_of(passages, "test" if seed % 4 == 0 else "train", r, 8):
            assert agrees(ask, texts), (ask, texts)
            seen[ask.kind] += 1
            if len(texts) > 1:  # the control: with the passages the other way round, hardly any answer is right
                total += 1
                wrong += not moved_agrees(ask, texts[::-1])
    assert set(seen) == set(order.KINDS) and min(seen.values()) > 60
    assert wrong > 0.6 * total


def moved_agrees(ask: Ask, texts: Sequence[str]) -> bool:
    try:
        return agrees(ask, texts)
    except IndexError:
        return False


def test_no_question_gives_or_asks_for_a_number() -> None:
    """A model that numbers its passages loses by reuse (``eval/README.md``)."""
    for templates in (order.AT_END, order.BEHIND, order.BEFORE, order.SENTENCE, order.WORDS, order.EVERY):
        assert not [template for template in templates if NUMBER.search(template.lower())]
    assert NUMBER.search("which passage is number 3?") and NUMBER.search("how does the third passage begin?")


def test_what_is_quoted_names_one_passage(corpus: Corpus, relations: Schema) -> None:
    alike = [Passage(f"The town of {name} lies here. More.", "") for name in ("Ada", "Bel", "Cor")]
    for seed in range(20):
        assert order.quoted(alike, 1, Random(seed)) in ("The town of Bel", "The town of Bel lies")
    assert order.quoted([alike[0], alike[0]], 0, Random(1)) is None
    assert order.quoted([Passage('The "Ada" lies here.', "")], 0, Random(1)) is None


def marked(encoder: Encoder, turn: Turn) -> list[tuple[str, float]]:
    """The tokens behind the prompt, decoded one by one, each with its weight."""
    row = encoder.row(conversation([turn], Weights(passage=0.0, question=0.0)))
    whole = encoder.row(conversation([Turn(turn.passages, turn.question, turn.answer)], Weights()))
    assert row.ids.tolist() == whole.ids.tolist()  # weights do not change what the tokens are
    first = int(np.flatnonzero(row.weights)[0])
    ids = [int(i) for i in row.ids[first:]]
    texts = [encoder.tokenizer.decode([ids[0], i], skip_special_tokens=False)[1:] for i in ids]
    return list(zip(texts, row.weights[first:].tolist(), strict=True))


def test_where_an_item_begins_its_tokens_count_most(corpus: Corpus, relations: Schema, vocabulary: Encoder) -> None:
    for seed in range(12):
        passages = passages_of(corpus, relations, seed, 2 + seed % 7)
        ask = key_facts(passages)
        turn = Turn([p.text for p in passages], ask.question, ask.answer, (), LISTED_IN_ORDER, ask.starts)
        tokens = marked(vocabulary, turn)
        runs = [list(run) for heavy, run in itertools.groupby(tokens[:-1], lambda x: x[1] == 4.0) if heavy]
        assert len(runs) == len(passages) and all(len(run) == 2 for run in runs)
        for run, passage, start in zip(runs, passages, ask.starts, strict=True):
            begun = "".join(text for text, _ in run).strip()
            assert begun and ask.answer[start:].startswith(begun), (begun, passage.first)
            assert passage.first.startswith(begun[: len(passage.first)])
        assert tokens[-1] == ("<|end|>", 3.0)
        assert {weight for _, weight in tokens[:-1]} == {4.0, 1.0}


def test_without_emphasis_all_tokens_of_an_answer_count_alike(vocabulary: Encoder) -> None:
    told, starts = numbered(["One thing is here.", "12 things are there."])
    assert [told[start:][:3] for start in starts] == ["One", "12 "]
    assert {weight for _, weight in marked(vocabulary, Turn((), "List.", told))} == {1.0}
    light = marked(vocabulary, Turn((), "List.", told, (), Emphasis(0.5, 3.0, 2.0), starts))
    assert "".join(text for text, weight in light if weight == 3.0).split() == ["One", "thing12"]


def test_all_facts_of_a_document_count_most_where_each_begins(corpus: Corpus, relations: Schema) -> None:
    world = World(Names.of_split(corpus, "train"), relations, "train", Random(5))
    asks = [ask for passage in documents(world, 3, (3, 6)) for ask in passage.asks if ask.kind == "facts"]
    for ask in asks:
        ends = [*(start - 1 for start in ask.starts[1:]), len(ask.answer)]
        items = [ask.answer[start:end] for start, end in zip(ask.starts, ends, strict=True)]
        assert len(items) == len(ask.about) and strung(items, [""] * len(items))[0] == ask.answer
        assert all(fact.value.lower() in item.lower() for fact, item in zip(ask.about, items, strict=True))
    assert asks and LONG_ANSWERS["facts"].start > LONG_ANSWERS["facts"].token


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_rows_of_all_stages_ask_for_order(corpus: Corpus, relations: Schema, encoder: Encoder, stage: int) -> None:
    rows = Rows(corpus, relations, encoder)
    only = Stage(1.0, STAGES[stage].num_tokens, (2, 4), 3, Weights(), {"world": 1.0})
    start = LONG_ANSWERS["order_list"].start
    heavy = [bool((rows.make(only, Random(seed)).weights == start).any()) for seed in range(40)]
    assert 1 <= sum(heavy) < 34


def test_the_paper_on_order_is_right_and_the_same_again(corpus: Corpus, relations: Schema, encoder: Encoder) -> None:
    papers = Papers(corpus, relations, encoder)
    items, again = (papers.items(papers.order(7), 24, 3) for _ in range(2))
    assert items == again and items != papers.items(papers.order(7), 24, 4)
    for item in items:
        found = looked_up(item.question, item.passages)
        assert len(item.passages) == 7 and found.startswith(item.answer), item
