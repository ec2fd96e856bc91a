"""Real questions from a file, asked with their gold passage among those of other questions.

The file holds one JSON object a line: ``question``, ``answers``, and ``ctxs``, passages with ``title``, ``text`` and
``isgold`` (the form of the public "Lost in the Middle" data; ``.gz`` is read too). Nothing of it is kept.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

from hypic.errors import ConfigError
from hypic_apps.eval.items import Item

NAME = "S7"
SEED = 20_267
# A question, its right answers, and the passage that has them.
Row = tuple[str, tuple[str, ...], str]


def items(path: Path, num_passages: int, number: int | None = None) -> list[Item]:
    """The first ``number`` questions of a seeded order, by default all, with ``num_passages`` passages each.

    Raises:
        ConfigError: the file cannot be read, is of another form, or holds fewer passages than are wanted.
    """
    rows = _rows(path)
    if len({text for _, _, text in rows}) < num_passages:
        raise ConfigError(f"{path.name} holds {len(rows)} gold passages; ask for fewer than --passages {num_passages}.")
    return drawn(rows, NAME, num_passages, number)


def drawn(rows: Sequence[Row], name: str, num_passages: int, number: int | None = None) -> list[Item]:
    """Items of the set ``name``: the first ``number`` rows in a seeded order, each among passages of other rows."""
    order = list(range(len(rows)))
    Random(SEED).shuffle(order)
    return [_item(rows, name, index, num_passages) for index in order[:number]]


def _item(rows: Sequence[Row], name: str, index: int, num_passages: int) -> Item:
    question, answers, gold = rows[index]
    r = Random(f"{SEED}/{index}/{num_passages}")
    chosen = [gold]
    while len(chosen) < num_passages:
        text = rows[r.randrange(len(rows))][2]
        if text not in chosen:
            chosen.append(text)
    r.shuffle(chosen)
    asked = question[:1].upper() + question[1:] + ("" if question.endswith("?") else "?")
    return Item(name, index, tuple(chosen), asked, answers, (chosen.index(gold),))


def _rows(path: Path) -> list[Row]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return [_row(json.loads(line)) for line in file if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error.strerror or error}; name a file of questions."
        ) from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(
            f"{path.name} is not of the expected form ({type(error).__name__}: {error}); "
            "write question, answers and ctxs a line."
        ) from error


def _row(row: dict[str, object]) -> Row:
    question, answers, contexts = row["question"], row["answers"], row["ctxs"]
    if not (isinstance(question, str) and isinstance(answers, list) and isinstance(contexts, list)):
        raise TypeError("question is text, answers and ctxs are lists")
    gold = next((c for c in contexts if c.get("isgold")), None)
    if gold is None:
        raise ValueError("no ctxs entry with isgold")
    return question, tuple(map(str, answers)), f"{gold['title']}: {gold['text']}" if gold.get("title") else gold["text"]
