"""Real passages on demand, each with the questions that it answers: articles, lists of country facts, glosses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from random import Random

from hypic_apps.train.corpus import Article, Corpus
from hypic_apps.train.names import Names
from hypic_apps.train.natural import (
    article_asks,
    article_passage,
    base_title,
    called,
    country_passage,
    gloss_passage,
)
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.reading import asks_of
from hypic_apps.train.renaming import Renamer
from hypic_apps.train.written import Written, answered, typed

# Of articles that are only copied from, the share of those that are hard to copy, and what their first sentences have;
# the chance that the others are of one topic, so that they begin alike.
HARD, LONG, ALIKE = 0.4, 180, 0.3
# Of contexts of articles, those of articles that have questions written on them, and of these, those of invented ones
# alone; how many other questions such an article keeps. Of articles that are asked about, those in other names.
WRITTEN, INVENTED, RULED, RENAMED = 0.6, 0.4, 2, 0.6
STRANGE = re.compile(r"[^\x00-\x7f–’]|[\"“=+*/^]|\(.{30}|\d.*\d.*\d{4}.*\d{4}")


class Library:
    """Real passages on demand, from the articles that may be trained on, or from those held out.

    ``written`` are questions that were written on articles, and invented articles with theirs.
    """

    def __init__(self, corpus: Corpus, *, held_out: bool = False, written: Written | None = None) -> None:
        self.articles = tuple(a for a in corpus.articles if a.held_out == held_out)
        self.countries, self.glosses = corpus.countries, corpus.glosses
        self.by_topic: dict[str, list[Article]] = {}
        for article in self.articles:
            self.by_topic.setdefault(article.topic, []).append(article)
        self.hard = tuple(a for a in self.articles if is_hard(a)) or self.articles
        self.sentences = tuple(_short_sentences(self.articles))
        self.written = written.asks if written else {}
        self.invented = written.articles if written else ()
        self.read = (*(a for a in self.articles if a.title in self.written), *self.invented)
        self._corpus = corpus
        self._asks: dict[str, tuple[Ask, ...]] = {}
        self._further: dict[str, Sequence[tuple[str, Ask]]] = {}

    @cached_property
    def renamer(self) -> Renamer:
        """Made when first asked for: only training tells articles under other names."""
        common = (gloss.word for gloss in self.glosses if gloss.word.islower())
        return Renamer(Names.of_split(self._corpus, "train"), common)

    def article(self, article: Article, r: Random) -> Passage:
        """An article as a passage; its pairs are found once."""
        asks = self._asks.get(article.title)
        if asks is None:
            asks = self._asks[article.title] = tuple(article_asks(article))
        return replace(article_passage(article, asks, r), about=called(article))

    def absent(self, passages: Sequence[Passage], r: Random) -> list[Ask]:
        """A question on an article that is not among the passages, nor named in them; mostly one, or none."""
        texts = " ".join(p.text for p in passages).lower()
        article = r.choice(self.articles)
        name = base_title(article.title)
        found = [a for a in article_asks(article) if name in a.question] if name.lower() not in texts else []
        return [Ask("none", r.choice(found).question, "not stated")] if found else []

    def questioned(self, article: Article, r: Random) -> Passage:
        """An article as a passage with the questions that only training asks: on each sentence that was not cut off,
        or, where questions were written on it, those and a few of the others."""
        passage = self.article(article, r)
        if article.title not in self._further:
            self._further[article.title] = tuple(asks_of(article, Random(article.title)))
        more = tuple(ask for sentence, ask in self._further[article.title] if sentence in passage.text)
        own = typed(answered(self.written.get(article.title, ()), article.text, passage.text), r)
        others = [*passage.asks, *more]
        return replace(passage, asks=(*own, *(r.sample(others, min(RULED, len(others))) if own else others)))

    def articles_alone(self, number: int, r: Random) -> list[Passage]:
        """At most ``number`` articles as passages, none twice, without the questions of training; some hard to copy."""
        pool = self.by_topic[r.choice(sorted(self.by_topic))] if r.random() < ALIKE else self.articles
        chosen = [r.choice(self.hard if r.random() < HARD else pool) for _ in range(number)]
        return [self.article(a, r) for a in {a.title: a for a in chosen}.values()]

    def passages(self, number: int, r: Random) -> list[Passage]:
        """``number`` passages, all articles of one topic, a mixture, or with lists among them; often in other names."""
        pool = self._pool(number, r)
        out = [self.questioned(a, r) for a in r.sample(pool, min(number, len(pool)))]
        out = [self.renamer.renamed(p, r) if r.random() < RENAMED else p for p in out]
        if self.articles and r.random() < 0.3:
            out[r.randrange(len(out))] = country_passage(r.choice(self.countries), r)
        if r.random() < 0.3:
            out[r.randrange(len(out))] = gloss_passage(self.glosses, r)
        return out

    def _pool(self, number: int, r: Random) -> Sequence[Article]:
        """The articles to draw ``number`` from: those with questions written on them, all, or those of a topic."""
        if r.random() < WRITTEN:
            read = self.invented if r.random() < INVENTED else self.read
            if len(read) >= number:
                return read
        return self.articles if r.random() < 0.5 else self.by_topic[r.choice(sorted(self.by_topic))]


def is_hard(article: Article) -> bool:
    """Whether the first sentence is long, or has foreign letters, quotes, formulas, long brackets or many numbers."""
    first = article.text.split(". ")[0]
    return len(first) >= LONG or STRANGE.search(first) is not None


def _short_sentences(articles: Sequence[Article]) -> Iterator[str]:
    for article in articles:
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", article.text):
            if 40 < len(sentence) < 150 and sentence.endswith("."):
                yield sentence
