"""What the demo reads: the bundled corpus, or a folder of the same make.

A folder holds ``.txt`` and ``.md`` files and a ``questions.json``: a list of objects with ``question`` and
``expected``.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic_apps import corpus
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.files import TextFile, read_all

QUESTIONS = "questions.json"


@dataclass(frozen=True)
class Question:
    """A question and the answer to expect."""

    question: str
    expected: str

    def is_answered_by(self, answer: str) -> bool:
        """Whether an answer is the expected one, but for case, punctuation, articles and white space."""
        return normalised(answer) == normalised(self.expected)


@dataclass(frozen=True)
class DemoCorpus:
    """Documents and questions about them."""

    documents: Sequence[TextFile]
    questions: Sequence[Question]


def bundled() -> DemoCorpus:
    """The corpus that comes with hypic."""
    documents = [TextFile(document.name, document.text) for document in (*corpus.company(), *corpus.articles())]
    return DemoCorpus(documents, [Question(q.question, q.expected) for q in corpus.questions()])


def of_folder(folder: Path) -> DemoCorpus:
    """A corpus of one's own.

    Raises:
        InputError: the folder, a file or the questions cannot be used.
    """
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is no folder; pass one with text files and a {QUESTIONS}.")
    names = read_all([str(folder)])
    documents = [TextFile(Path(file.name).relative_to(folder).as_posix(), file.text) for file in names]
    return DemoCorpus(documents, _questions(folder / QUESTIONS))


def normalised(text: str) -> str:
    """Lower case, without punctuation and English articles, single spaces."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _questions(path: Path) -> list[Question]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}; write the questions there.") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is no JSON ({error}); correct it.") from error
    if not isinstance(rows, list) or not rows:
        raise InputError(f'{str(path)!r} holds no list of questions; write [{{"question": ..., "expected": ...}}].')
    return [_question(row, path) for row in rows]


def _question(row: Any, path: Path) -> Question:
    question, expected = (row.get("question"), row.get("expected")) if isinstance(row, dict) else (None, None)
    if not isinstance(question, str) or not isinstance(expected, str) or not question.strip() or not expected.strip():
        raise InputError(f"{str(path)!r} holds {row!r}, which lacks a question or what is expected; add it.")
    return Question(question, expected)
