"""Real passages under other names and in other years, their questions and answers alike, so that they must be read.

A small model that meets the same article hundreds of times knows its answers by heart; renamed, it has to find them.
For training alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

from hypic_apps.train.names import MONTHS, Names
from hypic_apps.train.passages import BEGIN_SMALL, GRAMMAR, Passage

# A capital within a sentence: what only begins one may be any word.
WITHIN = re.compile(r"(?<=[\w,;:)”\"'] )[A-Z][a-zà-ÿ]{3,}(?![\w’-])|(?<=[(“\"])[A-Z][a-zà-ÿ]{3,}(?![\w’-])")
YEAR = re.compile(r"(?<![\d.,])(?:1[0-9]|20)\d\d(?!\d|,\d)")
# Words of every text that are no names, whatever they begin; a dictionary of nouns and verbs has few of them.
NO_NAMES = GRAMMAR.union(
    (word.lower() for word in BEGIN_SMALL),
    "these those between until than then whereas unlike like through against despite however also other both".split(),
    "several each every such only still even just about around among within without across along often later".split(),
    "sometimes together whether whose while though where why".split(),
)
# How far years may move, and the last that may come of it; names keep as they are by this chance each.
EARLIER, LATER, LAST_YEAR, KEPT = -90, 60, 2025, 0.25


class Renamer:
    """Exchanges names for others; ``common`` are words, in small letters, that are none."""

    def __init__(self, names: Names, common: Iterable[str]) -> None:
        one_word = (name for name in (*names.towns, *names.first) if name.isalpha())
        self.pool = tuple(sorted({*one_word, *names.coined}))
        self.common = NO_NAMES.union(common, (month.lower() for month in MONTHS))

    def renamed(self, passage: Passage, r: Random) -> Passage:
        """The passage with all its questions, each name replaced by the same other one everywhere and all years moved
        by the same number of years."""
        change = _Change(self._names(f"{passage.text} {passage.about}", r), _moved(passage.text, r))
        text = change(passage.text)
        asks = (replace(ask, question=change(ask.question), answer=change(ask.answer)) for ask in passage.asks)
        kept = tuple(ask for ask in asks if ask.answer in text)
        return replace(passage, text=text, first=change(passage.first), asks=kept, about=change(passage.about))

    def _names(self, text: str, r: Random) -> Mapping[str, str]:
        found = dict.fromkeys(WITHIN.findall(text))
        chosen = [w for w in found if w.lower() not in self.common and f" {w.lower()}" not in text]
        return {word.lower(): r.choice(self.pool).lower() for word in chosen if r.random() >= KEPT}


class _Change:
    def __init__(self, names: Mapping[str, str], years: int) -> None:
        self.names, self.years = names, years
        words = "|".join(sorted(names, key=len, reverse=True))
        self.word = re.compile(rf"(?<![\w'’-])(?:{words})(?![\w’-])", re.IGNORECASE) if names else None

    def __call__(self, text: str) -> str:
        text = YEAR.sub(lambda m: str(int(m.group()) + self.years), text)
        return self.word.sub(lambda m: self._like(m.group()), text) if self.word else text

    def _like(self, word: str) -> str:
        other = self.names[word.lower()]
        return other if word.islower() else other.upper() if word.isupper() else other[:1].upper() + other[1:]


def _moved(text: str, r: Random) -> int:
    years = [int(year) for year in YEAR.findall(text)]
    return r.randint(EARLIER, min(LATER, LAST_YEAR - max(years))) if years and min(years) + EARLIER > 1000 else 0
