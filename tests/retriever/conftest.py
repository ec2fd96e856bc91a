"""Documents made of known units, so that an edit can be said exactly; and an embedder without weights."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

_WORDS = (
    "harbour winter council bridge copper lantern orchard signal valley museum engine garden ledger market river "
    "station teacher violin window archive baker canal doctor emperor forest glacier hunter island journey kitchen "
    "letter mountain nephew officer painter quarry railway sailor tower uncle village weaver yard zinc amber basin "
    "carried opened measured crossed repaired found kept sold counted planted closed moved built painted wrote "
    "slowly early often rarely twice again nearly still before after during between under along above without "
    "old narrow heavy bright quiet northern second wooden common empty distant careful public broken steep"
).split()


@dataclass(frozen=True)
class Part:
    """A block of a document: its kind and its editable units (sentences, items, rows, lines)."""

    kind: str
    units: tuple[str, ...]

    def render(self, newline: str) -> str:
        if self.kind == "bullets":
            return newline.join(f"- {unit}" for unit in self.units)
        if self.kind == "table":
            return newline.join(
                ["| what | where |", "|---|---|", *(f"| {unit} | {len(unit)} |" for unit in self.units)]
            )
        if self.kind == "code":
            return newline.join(["```python", *(f"    print({unit!r})" for unit in self.units), "```"])
        if self.kind == "lines":
            return newline.join(self.units)
        return " ".join(self.units)


@dataclass(frozen=True)
class Document:
    parts: tuple[Part, ...]
    newline: str = "\n"

    @property
    def text(self) -> str:
        return (self.newline * 2).join(part.render(self.newline) for part in self.parts if part.units)

    def edited(self, rng: random.Random) -> Document:
        """One unit inserted after another, deleted or changed."""
        where = rng.choice([i for i, part in enumerate(self.parts) if part.kind != "heading"])
        units = list(self.parts[where].units)
        at = rng.randrange(len(units))
        what = rng.choice(["insert", "delete", "change"])
        if what == "insert":
            units.insert(at + 1, sentence(rng))
        else:
            units[at : at + 1] = [sentence(rng)] if what == "change" else []
        parts = list(self.parts)
        parts[where] = Part(parts[where].kind, tuple(units))
        return replace(self, parts=tuple(part for part in parts if part.units))


def sentence(rng: random.Random) -> str:
    words = rng.choices(_WORDS, k=rng.choice([5, 8, 11, 14, 17, 22, 28]))
    return " ".join(words).capitalize() + rng.choice("...?!")


def _part(rng: random.Random, kind: str, low: int, high: int) -> Part:
    return Part(kind, tuple(sentence(rng) for _ in range(rng.randint(low, high))))


def _heading(rng: random.Random, level: int) -> Part:
    return Part("heading", ("#" * level + " " + " ".join(rng.choices(_WORDS, k=3)).title(),))


def _article(rng: random.Random, newline: str = "\n") -> Document:
    parts: list[Part] = [_heading(rng, 1)]
    for _ in range(12):
        parts.append(_heading(rng, rng.choice([2, 2, 3])))
        for _ in range(rng.randint(1, 4)):
            kind, high = rng.choice([("text", 9), ("text", 3), ("text", 20), ("bullets", 8), ("table", 6), ("code", 8)])
            parts.append(_part(rng, kind, 1, high))
    return Document(tuple(parts), newline)


_MAKERS: dict[str, Callable[[random.Random], Document]] = {
    "headings, lists, tables and code": _article,
    "the same with CRLF": lambda rng: _article(rng, "\r\n"),
    "paragraphs without headings": lambda rng: Document(tuple(_part(rng, "text", 1, 9) for _ in range(40))),
    "short paragraphs": lambda rng: Document(tuple(_part(rng, "text", 1, 2) for _ in range(90))),
    "long paragraphs": lambda rng: Document(tuple(_part(rng, "text", 20, 60) for _ in range(5))),
    "one paragraph": lambda rng: Document((_part(rng, "text", 180, 200),)),
    "one long list": lambda rng: Document((_part(rng, "bullets", 150, 180),)),
    "one long table": lambda rng: Document((_part(rng, "table", 150, 180),)),
    "one long code block": lambda rng: Document((_part(rng, "code", 150, 180),)),
    "hard-wrapped lines": lambda rng: Document(tuple(_part(rng, "lines", 2, 30) for _ in range(12))),
}


@pytest.fixture(params=list(_MAKERS), ids=lambda name: name.replace(" ", "-").replace(",", ""))
def document(request: pytest.FixtureRequest) -> Document:
    return _MAKERS[request.param](random.Random(f"document {request.param}"))


@pytest.fixture
def article() -> Document:
    return _article(random.Random(5))


class WordHashEmbedder:
    """Counts words in hashed buckets; words of ``synonyms`` share a bucket, so it knows some meaning.

    ``salt`` makes it another model.
    """

    def __init__(self, dimension: int = 64, synonyms: Sequence[set[str]] = (), salt: str = "") -> None:
        self.dimension = dimension
        self.num_embedded = 0
        self._salt = salt
        self._meaning = {word: f"meaning {i}" for i, words in enumerate(synonyms) for word in words}

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                name = self._salt + self._meaning.get(word, word)
                vectors[row, int(hashlib.md5(name.encode()).hexdigest(), 16) % self.dimension] += 1
        return vectors

    def embed_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_embedded += len(texts)
        return self.embed_queries(texts)


@pytest.fixture
def make_embedder() -> type[WordHashEmbedder]:
    return WordHashEmbedder
