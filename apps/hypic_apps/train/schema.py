"""What the fictional worlds can say: kinds of things, their relations, and how each is stated and asked for.

The relations stand in ``relations/*.txt``, whose first lines explain the form. A ``Split`` decides what may be used:
``train`` never sees the last two statements and the last question of a relation, nor relations marked as held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "test"]
Ways = tuple[tuple[str, tuple[str, ...]], ...]
FOLDER = Path(__file__).parent / "relations"


@dataclass(frozen=True)
class Relation:
    """One relation of a kind of thing; ``value`` names a kind of value in ``names.py`` or ``choices`` holds them.

    An ``invented`` relation is for training alone, so all its wordings are. ``more_said`` and ``more_asked`` are made
    by ``grammar.py``, for training too; ``names`` are words that may stand for the relation, ``nouns`` those of them
    that stand in the place of ``noun``. ``ways`` are the words that tell it, by the way in which they do: "noun", or
    one of those of ``frames.of_way``; none where the relation is told in other words than its own.
    """

    key: str
    value: str
    choices: tuple[str, ...]
    noun: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    reverse: tuple[str, ...] = ()
    held_out: bool = False
    invented: bool = False
    more_said: tuple[str, ...] = ()
    more_asked: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    nouns: tuple[str, ...] = ()
    ways: Ways = ()

    def said(self, split: Split) -> tuple[str, ...]:
        """Statement templates of a split: the last two are for ``test`` alone."""
        if self.invented:
            return self.statements
        return self.statements[:-2] if split == "train" else self.statements[-2:]

    def asked(self, split: Split) -> tuple[str, ...]:
        """Question templates of a split: the last one is for ``test`` alone."""
        if self.invented:
            return self.questions
        return self.questions[:-1] if split == "train" else self.questions[-1:]

    def asked_back(self, split: Split) -> tuple[str, ...]:
        """Templates that give the value and ask for the subject."""
        if self.invented:
            return self.reverse
        return self.reverse[:-1] if split == "train" else self.reverse[-1:]


Schema = Mapping[str, tuple[Relation, ...]]


def load(folder: Path = FOLDER) -> Schema:
    """All kinds of things and their relations, in a fixed order.

    Raises:
        ValueError: a line is none of the known forms.
    """
    schema: dict[str, tuple[Relation, ...]] = {}
    for path in sorted(folder.glob("*.txt")):
        for kind, relation in _parse(path):
            schema[kind] = (*schema.get(kind, ()), relation)
    return schema


def _parse(path: Path) -> Iterator[tuple[str, Relation]]:
    kind, block = "", list[str]()
    for line in [*path.read_text(encoding="utf-8").splitlines(), "@"]:
        if line.startswith("#") or not line.strip():
            continue
        if block and line[0] in "@[!":
            yield kind, _relation(block)
            block = []
        if line[0] == "@":
            kind = line[1:]
        elif line[0] in "[!=?~":
            block.append(line)
        else:
            raise ValueError(f"{path.name} has the line {line[:40]!r}; begin it with @ [ ! = ? ~ or #.")


def choices_of(value: str) -> tuple[str, ...]:
    """The values that "one of a|b" lists; none where ``value`` names a kind of value."""
    return tuple(value.removeprefix("one of ").split("|")) if value.startswith("one of ") else ()


def _relation(block: list[str]) -> Relation:
    head, noun = block[0].rsplit(" | ", 1)
    key, value = head.lstrip("![").split("] ", 1)
    lists = {line[0]: tuple(part.strip() for part in line[2:].split(" / ")) for line in block[1:]}
    choices = choices_of(value)
    return Relation(
        key=key,
        value="choice" if choices else value,
        choices=choices,
        noun=noun,
        statements=lists["="],
        questions=lists["?"],
        reverse=lists.get("~", ()),
        held_out=block[0].startswith("!"),
    )
