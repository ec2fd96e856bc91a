"""Questions that were written on articles: their file, when a passage answers them, and articles in other names."""

from __future__ import annotations

import bz2
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from hypic_apps.eval import pool
from hypic_apps.train import written
from hypic_apps.train.corpus import Article, Corpus, held_out
from hypic_apps.train.library import RULED, Library
from hypic_apps.train.names import Names
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.renaming import LAST_YEAR, Renamer
from hypic_apps.train.written import Written, answered, typed

TEXT = (
    "The Velwick Bridge is a bridge in Osthal. It was opened by Ann Tolmer in 1874. People in Osthal call it the Comb. "
    "Since 1920 it has been closed to carts. King Ann Tolmer of Osthal paid for it."
)
ARTICLE = Article("Velwick Bridge", TEXT, "Bridge in Osthal", "Technology")
WRITTEN = (
    Ask("natural", "who was the first across the velwick bridge", "Ann Tolmer"),
    Ask("natural", "what do locals call the velwick bridge", "the Comb"),
    Ask("natural", "Since when have carts been kept off the Velwick Bridge?", "1920"),
)


def test_no_written_question_is_about_what_is_held_out_and_none_to_measure_with_is_trained_on() -> None:
    trained, kept = written.load(written.FILE).asks, written.load(pool.FOLDER / pool.QUESTIONS).asks
    assert len(trained) > 1000 and not any(held_out(title) for title in trained)
    assert len(kept) > 100 and all(held_out(title) for title in kept)
    for asks in (*trained.values(), *kept.values()):
        assert all(ask.answer.lower() not in ask.question.lower() for ask in asks)


def test_no_question_to_measure_with_is_asked_in_training_not_even_of_another_article() -> None:
    kept = {_bare(ask) for asks in written.load(pool.FOLDER / pool.QUESTIONS).asks.values() for ask in asks}
    trained = {_bare(ask) for asks in written.both().asks.values() for ask in asks}
    assert len(kept) > 800 and len(trained) > 10_000 and not kept & trained


def _bare(ask: Ask) -> str:
    return " ".join(re.findall(r"\w+", ask.question.lower()))


def test_invented_articles_answer_their_questions_and_are_none_of_the_encyclopedia() -> None:
    invented = written.load(written.INVENTED)
    assert len(invented.articles) == len(invented.asks) > 50
    assert not set(invented.asks) & {*written.load(written.FILE).asks, *(a.title for a in pool.load().library.articles)}
    for article in invented.articles:
        assert all(ask.answer in article.text for ask in invented.asks[article.title])


def test_every_question_to_measure_with_is_answered_by_its_article() -> None:
    texts = {article.title: article.text for article in pool.load().library.articles}
    for title, asks in pool.load().library.written.items():
        assert all(ask.answer in texts[title] for ask in asks)


@pytest.mark.parametrize(
    "lines",
    ["who is it | Ann", "= A text.", "# A title\nno mark here", "# A title\n | Ann", "# A title\nwho is it | "],
    ids=["no title", "text without title", "no mark", "no question", "no answer"],
)
def test_a_line_of_another_form_is_refused_with_its_text(lines: str, tmp_path: Path) -> None:
    (tmp_path / "q.bz2").write_bytes(bz2.compress(lines.encode()))
    with pytest.raises(ValueError, match=re.escape(lines.splitlines()[-1])):
        written.load(tmp_path / "q.bz2")


def test_a_cut_passage_answers_only_what_the_rest_does_not_say_again() -> None:
    cut = TEXT[: TEXT.index(" Since")]
    assert answered(WRITTEN, TEXT, f"Velwick Bridge\n{TEXT}") == WRITTEN
    assert [ask.answer for ask in answered(WRITTEN, TEXT, cut)] == ["the Comb"]


def test_half_of_what_was_typed_is_asked_as_a_proper_question() -> None:
    found = {ask.question for seed in range(20) for ask in typed(WRITTEN, Random(seed))}
    assert "Who was the first across the velwick bridge?" in found
    assert "who was the first across the velwick bridge" in found
    assert len(found) == 5  # the one that was proper stays as it is


def test_an_article_that_was_read_is_asked_what_was_written_and_little_else(corpus: Corpus) -> None:
    library = Library(corpus, written=Written({ARTICLE.title: WRITTEN}))
    whole = 0
    for seed in range(40):
        passage = library.questioned(ARTICLE, Random(seed))
        answers = [ask.answer for ask in passage.asks[:3]]
        if TEXT in passage.text:
            whole += 1
            assert answers == [ask.answer for ask in WRITTEN] and len(passage.asks) <= 3 + RULED
    assert whole > 10


def renamed(corpus: Corpus, seed: int) -> tuple[Passage, Passage]:
    passage = Passage(f"# Velwick Bridge\n\n{TEXT}", TEXT.split(". ")[0] + ".", WRITTEN, about="the Velwick Bridge")
    renamer = Renamer(Names.of_split(corpus, "train"), {"king", "people", "bridge", "comb"})
    return passage, renamer.renamed(passage, Random(seed))


def test_renaming_changes_names_and_years_everywhere_alike(corpus: Corpus) -> None:
    changed = 0
    for seed in range(40):
        before, after = renamed(corpus, seed)
        assert [ask.answer in after.text for ask in after.asks] == [True] * 3 and after.first in after.text
        assert after.about.removeprefix("the ") in after.text
        opened, closed = map(int, re.findall(r"\b\d{4}\b", after.text))
        assert closed - opened == 1920 - 1874 and closed <= LAST_YEAR and str(closed) == after.asks[2].answer
        if "Velwick" not in after.text:
            changed += 1
            assert "velwick" not in after.asks[0].question and "Velwick" not in after.asks[2].question
            name = after.about.split()[1]
            assert name.lower() in after.asks[0].question and name in after.asks[2].question
        assert "King " in after.text and "People " in after.text and "the Comb" in after.text
        assert after.text.count(" ") == before.text.count(" ")
    assert changed > 20


def test_what_only_begins_a_sentence_is_no_name(corpus: Corpus) -> None:
    passage = Passage("Translated often, the tale is known in Osthal. Osthal loves it.", "", ())
    for seed in range(20):
        text = Renamer(Names.of_split(corpus, "train"), ()).renamed(passage, Random(seed)).text
        assert text.startswith("Translated often")


def test_words_that_any_text_has_are_no_names_and_years_move_before_a_comma_too(corpus: Corpus) -> None:
    text = "The hit was Which Way? (Which Way), sung in 1931, sold for 1,931 crowns, and again in 1935, by Osthal."
    passage = Passage(text, "", (Ask("natural", "which song of 1931 was sung", "Which Way"),))
    years = set()
    for seed in range(20):
        after = Renamer(Names.of_split(corpus, "train"), ()).renamed(passage, Random(seed))
        (ask,) = after.asks
        assert ask.question.startswith("which song of ") and "1,931 crowns" in after.text
        first, second = re.findall(r"\b(\d{4}),", after.text)
        assert f"of {first} was" in ask.question and int(second) - int(first) == 4
        years.add(first)
    assert len(years) > 5


def test_an_answer_that_would_no_longer_stand_in_the_text_is_dropped(corpus: Corpus) -> None:
    passage = replace(renamed(corpus, 0)[0], asks=(Ask("natural", "Where is it?", "sthal"),))
    renamer = Renamer(Names.of_split(corpus, "train"), ())
    kept = [bool(renamer.renamed(passage, Random(seed)).asks) for seed in range(40)]
    assert any(kept) and not all(kept)
