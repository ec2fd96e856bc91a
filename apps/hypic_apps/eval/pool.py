"""What the evaluation sets are made of: names, wordings and articles that training never saw, frozen in ``data/``.

The sets are regenerated from seeds out of these files alone, so that later changes of the training data change no
question. ``freeze`` wrote them from the training text; running it again would make other sets, with other hashes.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypic_apps.train import schema, written
from hypic_apps.train.corpus import Article, Corpus
from hypic_apps.train.library import Library
from hypic_apps.train.names import Names, coined
from hypic_apps.train.schema import Relation, Schema

FOLDER = Path(__file__).parent / "data"
NAMES, WORDINGS, ARTICLES = "names.json.xz", "wordings.json.xz", "articles.json.xz"
QUESTIONS = "questions.txt.bz2"


@dataclass(frozen=True)
class Pool:
    """Names of the half kept for measuring, the wordings kept for measuring, and the articles held out."""

    names: Names
    schema: Schema
    library: Library


@cache
def load(folder: Path = FOLDER) -> Pool:
    """The frozen pool."""
    names = read(folder / NAMES)
    articles = tuple(Article(**row) for row in read(folder / ARTICLES))
    found = Corpus(articles, (), (), (), (), ())
    return Pool(
        Names(tuple(names["first"]), tuple(names["towns"]), coined("test")),
        {kind: tuple(_relation(row) for row in rows) for kind, rows in read(folder / WORDINGS).items()},
        Library(found, held_out=True, written=written.load(folder / QUESTIONS)),
    )


def freeze(corpus: Corpus, folder: Path = FOLDER) -> None:
    """Writes the pool's files from the training text; new evaluation sets begin here."""
    names = Names.of_split(corpus, "test")
    write({"first": names.first, "towns": names.towns}, folder / NAMES)
    write(_kept(schema.load()), folder / WORDINGS)
    write([asdict(article) for article in corpus.articles if article.held_out], folder / ARTICLES)


def _kept(found: Schema) -> dict[str, list[dict[str, Any]]]:
    """The relations that are trained on, with the wordings that are not."""
    return {kind: [_row(x) for x in relations if not x.held_out] for kind, relations in found.items()}


def _row(relation: Relation) -> dict[str, Any]:
    kept = {
        "statements": relation.said("test"),
        # The first one shows whether the kind takes an article; it is never asked.
        "questions": (relation.questions[0], *relation.asked("test")),
        "reverse": relation.asked_back("test"),
    }
    return {**asdict(relation), **kept}


def _relation(row: Mapping[str, Any]) -> Relation:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Relation(**values)


def write(content: object, path: Path) -> int:
    """Writes compressed JSON, the same bytes for the same content; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> Any:
    """What ``write`` wrote."""
    return json.loads(lzma.decompress(path.read_bytes()))
