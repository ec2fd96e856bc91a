"""Questions on encyclopedia summaries, which the project's authors wrote from reading, not by rules: ``questions/``.

They name a thing in other words than its article has, two thirds as one types them into a search engine. The answer is
a literal part of the article. ``invented.txt.bz2`` holds articles too, on things of which people ask much and the
encyclopedia has little: series, songs, teams, offices, invented though often after real ones, and in one of ten on a
real thing, such as a bone.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from hypic_apps.train.corpus import Article
from hypic_apps.train.passages import Ask, capitalise

FOLDER = Path(__file__).parent / "questions"
FILE, INVENTED = FOLDER / "articles.txt.bz2", FOLDER / "invented.txt.bz2"
INVENTED_TOPIC = "Invented"


@dataclass(frozen=True)
class Written:
    """Questions by title of their article, and the articles that were written with them."""

    asks: Mapping[str, tuple[Ask, ...]]
    articles: tuple[Article, ...] = ()


def both() -> Written:
    """All that may be trained on: questions on the encyclopedia's articles, and our own articles with theirs."""
    invented = load(INVENTED)
    return Written({**load(FILE).asks, **invented.asks}, invented.articles)


def load(file: Path) -> Written:
    """What a file holds: under a title ("# ...") the article's text, where it is not the encyclopedia's ("= ..."), and
    its questions ("question | answer").

    Raises:
        ValueError: a line is none of these, or stands before the first title.
    """
    asks: dict[str, list[Ask]] = {}
    articles: list[Article] = []
    for title, line in _titled(bz2.decompress(file.read_bytes()).decode().splitlines()):
        question, _, answer = line.partition(" | ")
        if title and line.startswith("= "):
            articles.append(Article(title, line[2:], "", INVENTED_TOPIC))
        elif title and question and answer:
            asks.setdefault(title, []).append(Ask("natural", question, answer))
        else:
            raise ValueError(f"the questions have the line {line[:40]!r}; write '# title', then 'question | answer'.")
    return Written({title: tuple(found) for title, found in asks.items()}, tuple(articles))


def _titled(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every line under a title, with it."""
    title = ""
    for line in filter(None, lines):
        if line.startswith("# "):
            title = line[2:]
        else:
            yield title, line


def answered(asks: Sequence[Ask], article: str, passage: str) -> tuple[Ask, ...]:
    """Those questions on an article's text that ``passage``, which may end sooner, surely answers: the whole text does,
    a part only where it has the answer and the rest has it not again."""
    if article in passage:
        return tuple(ask for ask in asks if ask.answer in passage)
    return tuple(ask for ask in asks if ask.answer in passage and article.count(ask.answer) == 1)


def typed(asks: Sequence[Ask], r: Random) -> tuple[Ask, ...]:
    """The questions, half of those that were typed without capital and mark as proper ones."""
    return tuple(_proper(ask) if ask.question[-1].isalnum() and r.random() < 0.5 else ask for ask in asks)


def _proper(ask: Ask) -> Ask:
    return replace(ask, question=f"{capitalise(ask.question)}?")
