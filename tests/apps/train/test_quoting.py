"""Questions for a span of the text: exact, found in one place by another way, in words that are not held out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from tokenizers import Tokenizer

from hypic.checkpoints import bundled
from hypic_apps.eval import pool
from hypic_apps.train import order, quoting
from hypic_apps.train import rows as made
from hypic_apps.train.corpus import Article, Corpus
from hypic_apps.train.exam import Papers
from hypic_apps.train.library import Library, is_hard
from hypic_apps.train.names import Names
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.render import Encoder
from hypic_apps.train.requests import FACTS, LISTS, bare, of_split
from hypic_apps.train.rows import FULL, LONG_ANSWERS, STAGES, Rows
from hypic_apps.train.scenes import key_facts
from hypic_apps.train.schema import Schema
from hypic_apps.train.world import World

KINDS = {
    "begins": quoting.BEGINS, "mentions": quoting.MENTIONS, "follows": quoting.FOLLOWS, "next": quoting.NEXT,
    "last": quoting.LAST, "whole": quoting.WHOLE, "about": quoting.ABOUT,
}  # fmt: skip
BRIDGE = Article(
    "Velwick Bridge (Osthal)",
    "The Velwick Bridge is a bridge of St. Osth in the north of Ostland. It was opened by Mr. Tolmer in 1874 and "
    "painted in 1901. It is crossed by about 3,000 people on every day of the week.",
    "Bridge in Osthal",
    "Technology",
)
SENTENCES = (
    "The Velwick Bridge is a bridge of St. Osth in the north of Ostland.",
    "It was opened by Mr. Tolmer in 1874 and painted in 1901.",
    "It is crossed by about 3,000 people on every day of the week.",
)
TOLD = (
    "{0} is a town of many bridges between {1} and {2} in the far north. In the year {6} a school was founded there by "
    "people who came from {3}. Others have called it {4}, after the river on which it lies. Travellers praise the old "
    "market of {5} above all."
)
QUOTED = re.compile(r'"(.+?)(?: \.\.\.)?"')


@pytest.mark.parametrize("kind", KINDS)
def test_no_wording_occurs_twice_and_the_last_is_kept(kind: str) -> None:
    wordings = KINDS[kind]
    assert len({bare(text) for text in wordings}) == len(wordings)
    assert of_split(wordings, "test") == wordings[-1:] and wordings[-1] not in of_split(wordings, "train")


def test_wordings_are_many_and_none_is_one_that_is_frozen() -> None:
    trained = [bare(text) for wordings in KINDS.values() for text in wordings[:-1]]
    assert len(trained) >= 80
    for held_out in (LISTS[-1], FACTS[-1]):
        wanted = bare(held_out).removeprefix("write down ")
        assert not any(wanted in text for text in trained) and wanted in bare(held_out)
    relations = [x for found in pool.load().schema.values() for x in found]
    frozen = {bare(text) for x in relations for text in (*x.said("test"), *x.asked("test"))}
    assert frozen and frozen.isdisjoint(trained)


def test_sentences_do_not_end_behind_abbreviations() -> None:
    passage = Passage(f"# Velwick Bridge\n\n{BRIDGE.text}", SENTENCES[0])
    assert quoting.sentences(passage) == SENTENCES
    listed = Passage("Notes\n- One thing is here. Another one is there.\n- Room = 5", "Notes")
    assert quoting.sentences(listed) == ("Notes", "- One thing is here.", "Another one is there.", "- Room = 5")


def contexts(corpus: Corpus, relations: Schema, seed: int) -> list[Passage]:
    r = Random(seed)
    library = Library(corpus)
    world = World(Names.of_split(corpus, "train"), relations, "train", r, library.sentences)
    found = [*library.passages(1 + seed % 5, r), *world.passages(seed % 4, 4), library.article(BRIDGE, r)]
    r.shuffle(found)
    return found


def named_in(question: str) -> str:
    """The words of a question by which a span is found: what is quoted, or a name or number of one sentence."""
    quote = QUOTED.search(question)
    if quote is not None:
        return quote.group(1)
    shapes = [re.escape(text).replace(r"\{w\}", "(.+)") for text in quoting.MENTIONS]
    found = [m.group(1) for m in (re.fullmatch(shape, question) for shape in shapes) if m]
    return min(found, key=len)


def test_answers_are_exact_and_what_names_them_stands_in_one_place(corpus: Corpus, relations: Schema) -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        passages = contexts(corpus, relations, seed)
        texts = [p.text for p in passages]
        shown = quoting.Shown(passages, "test" if seed % 4 == 0 else "train", Random(seed))
        for maker in quoting.MAKERS:
            ask = maker(shown)
            if ask is None:
                continue
            seen[maker.__name__] += 1
            assert ask.kind == quoting.KIND and ask.starts == (0,)
            assert quoting.LENGTHS[0] <= len(ask.answer) <= quoting.LENGTHS[1]
            assert any(ask.answer in text for text in texts)
            if maker in (quoting.begins, quoting.mentions, quoting.follows, quoting.after):
                check_place(maker.__name__, ask, texts)
    assert set(seen) == {maker.__name__ for maker in quoting.MAKERS} and min(seen.values()) > 12, seen


def check_place(kind: str, ask: Ask, texts: Sequence[str]) -> None:
    """Finds the answer again from the question's words."""
    words = named_in(ask.question)
    (text,) = [text for text in texts if words.lower() in text.lower()]
    assert text.lower().count(words.lower()) == 1, ask
    behind = text[text.lower().find(words.lower()) + len(words) :]
    if kind == "begins":
        assert ask.answer.startswith(words)
    elif kind == "mentions":
        assert words in ask.answer
    elif kind == "follows":
        assert behind.lstrip(" ,;:").startswith(ask.answer)
    else:
        assert ask.answer in behind and words not in ask.answer


def test_words_that_stand_twice_name_no_span() -> None:
    passage = Library(Corpus((), (), (), (), (), ()), held_out=True).article(BRIDGE, Random(2))
    twice = [passage, Passage(passage.text, passage.first, about=passage.about)]
    for seed in range(40):
        for maker in (quoting.begins, quoting.mentions, quoting.follows, quoting.after):
            assert maker(quoting.Shown(twice, "train", Random(seed))) is None
    once = [maker(quoting.Shown([passage], "train", Random(s))) for s in range(40) for maker in quoting.MAKERS]
    assert sum(ask is not None for ask in once) > 100  # the control: alone, it is asked about


def test_a_passage_is_called_by_what_it_alone_is_about(corpus: Corpus, relations: Schema) -> None:
    bridge = Library(corpus).article(BRIDGE, Random(1))
    assert quoting.about_of(bridge) == "the Velwick Bridge"
    other = Passage("The road to Velwick Bridge is long and has many bends in it.", "")
    alone = {quoting.pointed_at(quoting.Shown([bridge], "test", Random(s))) for s in range(30)}
    beside = {quoting.pointed_at(quoting.Shown([bridge, other], "test", Random(s))) for s in range(30)}
    called = (quoting.ABOUT[-1].replace("{x}", "the Velwick Bridge"), bridge)
    assert called in alone and called not in beside


def test_first_sentences_leave_out_what_stands_at_the_head(corpus: Corpus) -> None:
    library, seen = Library(corpus), set()
    for seed in range(200):
        passage = library.article(BRIDGE, Random(seed))
        ask = quoting.first(quoting.Shown([passage], "test", Random(seed)))
        if ask is not None:
            seen.add(passage.text.startswith("The Velwick"))
            assert ask.answer == passage.first and ask.answer.startswith("The Velwick Bridge is")
            assert order.SENTENCE[-1].split("{p}")[0] in ask.question
    assert seen == {True, False}


def test_hard_articles_are_long_or_strange() -> None:
    plain, strange = "A bridge is a way over water. It is long.", 'A bridge, or "pont", is a way over it. It is long.'
    long = f"A bridge is a way over {'very ' * 40}deep water. It is long."
    assert [is_hard(Article("Bridge", text, "", "")) for text in (plain, strange, long)] == [False, True, True]


def shares(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], list[list[Passage]]]:
    """How often each kind of question is drawn, those that are cut off later included, and of what lists are made."""
    kinds: Counter[str] = Counter()
    listed: list[list[Passage]] = []
    at_most = made._at_most

    def counted(questions: Sequence[Ask], room: int) -> Sequence[Ask]:
        found = at_most(questions, room)
        kinds.update(ask.kind for ask in found)
        return found

    def noted(passages: Sequence[Passage], question: str) -> Ask:
        listed.append(list(passages))
        return key_facts(passages, question)

    monkeypatch.setattr(made, "_at_most", counted)
    monkeypatch.setattr(made, "key_facts", noted)
    for seed in range(150):
        rows.make(STAGES[3], Random(seed))
    counts = kinds.copy()
    for seed in range(120):
        rows.make(replace(STAGES[3], kinds={"lists": 1.0}), Random(seed))
    return counts, listed


def test_shares_are_within_bounds(corpus: Corpus, relations: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(Tokenizer.from_file(str(bundled() / "tokenizer.json")))
    names = corpus.cities
    articles = tuple(
        Article(a.title, TOLD.format(a.title, *names[i : i + 5], 1700 + i), a.description, a.topic)
        for i, a in enumerate(corpus.articles)
    )
    kinds, listed = shares(Rows(replace(corpus, articles=articles), relations, encoder), monkeypatch)
    total = kinds.total()
    assert 0.008 < kinds[quoting.KIND] / total < 0.05
    assert 0.03 < kinds["none"] / total < 0.09
    alone = [p for p in listed if len(p) >= 3 and not any(x.facts for x in p)]
    assert FULL["lists"] and len(alone) >= 0.5 * len(listed) > 9
    assert LONG_ANSWERS["keyfacts"].token == 1.0 and LONG_ANSWERS[quoting.KIND].token == 0.7


def test_papers_of_articles_are_the_same_again(corpus: Corpus, relations: Schema, encoder: Encoder) -> None:
    papers = Papers(corpus, relations, encoder)
    for maker in (papers.sentences_of_articles(4), papers.quotes(6)):
        items, again = (papers.items(maker, 12, 3) for _ in range(2))
        assert items == again and items != papers.items(maker, 12, 4)
    for item in papers.items(papers.sentences_of_articles(4), 12, 3):
        assert item.question == LISTS[-1]
        parts = re.split(r" ?\(\d\) ", item.answer)[1:]
        assert all(part in text for part, text in zip(parts, item.passages, strict=True))
    for item in papers.items(papers.quotes(6), 12, 3):
        assert any(item.answer in text for text in item.passages)
