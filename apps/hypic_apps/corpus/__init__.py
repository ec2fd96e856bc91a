"""The demo's corpus: short encyclopedia articles, three documents of an invented company, and questions with answers.

The articles are Wikipedia text under CC BY-SA 4.0 (``encyclopedia/ATTRIBUTION.md``); everything else here is made up.
None of it was used to train the bundled model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Document:
    """One text of the corpus; ``name`` is its title or file name."""

    name: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question, the answer to expect, and the document that holds it."""

    question: str
    expected: str
    document: str


def articles() -> list[Document]:
    """The encyclopedia articles, in order of title."""
    lines = (FOLDER / "encyclopedia" / "articles.jsonl").read_text(encoding="utf-8").splitlines()
    return [Document(row["title"], row["text"]) for row in map(json.loads, lines)]


def company() -> list[Document]:
    """The invented company's documents, in order of file name."""
    files = sorted((FOLDER / "company").glob("*.md"))
    return [Document(path.name, path.read_text(encoding="utf-8")) for path in files]


def questions() -> list[Question]:
    """The demo's questions."""
    rows = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))
    return [Question(**row) for row in rows]
