"""Further wordings, written one by one, for training alone: ``relations/written.txt.bz2``.

A block begins with ``@kind [key]`` of a relation of ``schema.py``, or with ``@kind [key] value | noun`` of a new one;
then come statements (``= ``), questions (``? ``) and questions for the subject (``~ ``), a line each.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hypic_apps.train.schema import FOLDER

FILE = FOLDER / "written.txt.bz2"
HEAD = re.compile(r"@(\w+) \[(\w+)\](?: (.+) \| (.+))?")


@dataclass(frozen=True)
class Block:
    """The wordings of one relation; ``value`` and ``noun`` are those of a new one, or empty."""

    value: str = ""
    noun: str = ""
    statements: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    reverse: tuple[str, ...] = ()


def load(file: Path = FILE) -> Mapping[tuple[str, str], Block]:
    """The blocks by kind of thing and key of relation.

    Raises:
        ValueError: a line is none of the known forms, or stands before the first block, or a block stands twice.
    """
    found: dict[tuple[str, str], Block] = {}
    for place, block in _blocks(bz2.decompress(file.read_bytes()).decode().splitlines()):
        if place in found:
            raise ValueError(f"the written wordings have '@{place[0]} [{place[1]}]' twice; write one block of them.")
        found[place] = block
    return found


def _blocks(lines: list[str]) -> Iterator[tuple[tuple[str, str], Block]]:
    heads = [number for number, line in enumerate(lines) if line.startswith("@")]
    if heads[:1] != [0]:
        raise ValueError(f"the written wordings begin with {''.join(lines[:1])[:40]!r}; begin with '@kind [key]'.")
    for first, last in zip(heads, [*heads[1:], len(lines)], strict=True):
        head = HEAD.fullmatch(lines[first])
        odd = [line for line in lines[first + 1 : last] if line[:2] not in ("= ", "? ", "~ ")]
        if head is None or odd:
            wrong = (odd or [lines[first]])[0][:40]
            raise ValueError(f"the written wordings have the line {wrong!r}; write '@kind [key]', '= ', '? ' or '~ '.")
        by_mark = {m: tuple(x[2:] for x in lines[first + 1 : last] if x[0] == m) for m in "=?~"}
        yield (head[1], head[2]), Block(head[3] or "", head[4] or "", by_mark["="], by_mark["?"], by_mark["~"])
