"""Questions on the sentences of articles, and what training asks of articles that are not there."""

from __future__ import annotations

from random import Random

from hypic_apps.train.corpus import Article, Corpus
from hypic_apps.train.library import Library
from hypic_apps.train.reading import asks_of

TEXT = (
    "The Velwick Bridge is a bridge in Osthal. It was opened by Ann Tolmer in 1874. It was designed by Mark Fendale. "
    "It has seven arches. Ann Tolmer founded the first school of Osthal. Its towers were painted in 1901. "
    "The old road was closed on 4 March 1920. It is crossed by about 3,000 people every day."
)
ARTICLE = Article("Velwick Bridge", TEXT, "Bridge in Osthal", "Technology")


def asked() -> dict[str, str]:
    found = [ask for seed in range(40) for _, ask in asks_of(ARTICLE, Random(seed))]
    return {ask.question: ask.answer for ask in found}


def test_sentences_about_the_thing_are_asked_in_several_ways() -> None:
    found = asked()
    assert found["When was the Velwick Bridge opened by Ann Tolmer?"] == "1874"
    assert found["By whom was the Velwick Bridge designed?"] == "Mark Fendale"
    assert found["How many arches does the Velwick Bridge have?"] == "seven"
    assert found["What is crossed by about 3,000 people every day?"] == "Velwick Bridge"
    assert found["Who founded the first school of Osthal?"] == "Ann Tolmer"
    assert found["Velwick Bridge: when was the old road closed?"] == "4 March 1920"
    assert not any("towers" in question and "___" not in question for question in found)


def test_no_pronoun_is_an_answer() -> None:
    found = {}
    for told in ("She", "Bel Osterman"):
        text = f"Anna Maria Tolmer was a teacher in Osthal. {told} founded the second school of the town in 1880."
        article = Article("Ann Tolmer", text, "Teacher", "People")
        found[told] = {ask.answer for seed in range(20) for _, ask in asks_of(article, Random(seed))}
    assert "Bel Osterman" in found["Bel Osterman"] and "She" not in found["She"]


def test_answers_stand_in_the_text_and_gaps_hide_them() -> None:
    gaps = 0
    for question, answer in asked().items():
        assert answer in TEXT
        if "___" in question:
            gaps += 1
            assert answer not in question.split(": ", 1)[1]
    assert gaps > 3


def test_only_sentences_that_were_not_cut_off_are_asked_about(corpus: Corpus) -> None:
    library = Library(corpus)
    cut = 0
    for seed in range(60):
        passage = library.questioned(ARTICLE, Random(seed))
        for sentence, ask in library._further[ARTICLE.title]:
            assert (ask in passage.asks) == (sentence in passage.text)
            cut += sentence not in passage.text
    assert cut > 10


def test_an_absent_article_is_not_stated(corpus: Corpus) -> None:
    library = Library(corpus)
    seen = 0
    for seed in range(30):
        passages = library.passages(4, Random(seed))
        for ask in library.absent(passages, Random(seed)):
            seen += 1
            name = next(a.title for a in library.articles if a.title in ask.question)
            assert ask.answer == "not stated" and not any(name in p.text for p in passages)
    assert seen > 10


def test_what_is_held_out_is_asked_as_before(corpus: Corpus) -> None:
    library = Library(corpus, held_out=True)
    passage = library.article(ARTICLE, Random(1))
    assert not any("___" in ask.question or ask.question.startswith("By whom") for ask in passage.asks)
