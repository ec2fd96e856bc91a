"""Wordings made of phrases: ``phrases/*.txt`` says what a relation is called, frames say how one speaks of such things.

So a relation is met in many more words than were written by hand, and every word in many frames, which is how a model
learns which words of a question count. Wordings that are kept for measuring are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypic_apps.train import frames
from hypic_apps.train import wordings as wordings_of
from hypic_apps.train.frames import filled
from hypic_apps.train.schema import Relation, Schema, Ways, choices_of
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.wordings import Block
from hypic_apps.train.words import past, third

FOLDER = Path(__file__).parent / "phrases"
MOST_PER_TEMPLATE = 4
Frames = tuple[Sequence[str], Sequence[str]]


@dataclass(frozen=True)
class Phrases:
    """What a relation is called, and the ways in which verbs tell it: (way, words)."""

    nouns: tuple[str, ...]
    ways: Ways

    @property
    def names(self) -> frozenset[str]:
        """All words that may stand for the relation."""
        return frozenset((*self.nouns, *(word for _, words in self.ways for word in words)))


def enriched(schema: Schema, synonyms: Thesaurus, folder: Path = FOLDER) -> Schema:
    """The schema with further wordings for training, and with relations that are for training alone."""
    kept = kept_back(schema)
    known, more = dict(parsed(folder / "known.txt")), dict(parsed(folder / "more.txt"))
    written = wordings_of.load()
    out: dict[str, tuple[Relation, ...]] = {}
    for kind, relations in schema.items():
        article = "the " if "the {s}" in relations[0].questions[0] else ""
        found = [_with_more(x, known.get((kind, x.key)), article, synonyms, kept) for x in relations]
        found = [_with_written(x, written.get((kind, x.key), Block()), kept) for x in found]
        added = [_new(key, phrases, article, kept) for (of, key), phrases in more.items() if of == kind]
        new = [_written(key, block, kept) for (of, key), block in written.items() if of == kind and block.value]
        out[kind] = (*found, *added, *new)
    return out


def kept_back(schema: Schema) -> frozenset[str]:
    """All wordings that are for measuring only, plain."""
    every = (x for relations in schema.values() for x in relations)
    return frozenset(plain(t) for x in every for t in (*x.said("test"), *x.asked("test"), *x.asked_back("test")))


def plain(template: str) -> str:
    """A wording without case and punctuation."""
    return " ".join(re.findall(r"[a-z{}']+", template.lower()))


def parsed(path: Path) -> Iterator[tuple[tuple[str, str], Phrases]]:
    """((kind of thing, key), phrases) of every line of a file of phrases.

    Raises:
        ValueError: a line has no colon.
    """
    kind = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("@"):
            kind = line[1:].strip()
        elif line.strip() and not line.startswith("#"):
            key, mark, rest = line.partition(": ")
            if not mark:
                raise ValueError(f"{path.name} has the line {line[:40]!r}; write it as 'key: noun, noun | way: verb'.")
            yield (kind, key), _phrases(rest)


def _phrases(text: str) -> Phrases:
    nouns, *ways = (part.strip() for part in text.split("|"))
    pairs = (part.split(": ", 1) for part in ways if part)
    return Phrases(_listed(nouns), tuple((way, _listed(words)) for way, words in pairs))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(", "))


def _with_more(
    relation: Relation, phrases: Phrases | None, article: str, synonyms: Thesaurus, kept: frozenset[str]
) -> Relation:
    if relation.held_out:
        return relation
    said = [_first(synonyms.reworded(t)) for t in relation.said("train")]
    asked = [_first(synonyms.reworded(t)) for t in relation.asked("train")]
    more = wordings(relation.value, phrases, article) if phrases else ([], [])
    return replace(
        relation,
        more_said=_allowed((*(t for some in said for t in some), *more[0]), kept),
        more_asked=_allowed((*(t for some in asked for t in some), *more[1]), kept),
        names=phrases.names if phrases else frozenset((relation.noun,)),
        nouns=phrases.nouns if phrases else (),
        ways=(("noun", phrases.nouns), *phrases.ways) if phrases else (("noun", (relation.noun,)),),
    )


def _new(key: str, phrases: Phrases, article: str, kept: frozenset[str]) -> Relation:
    name, value = key.split(" ")
    said, asked = (_allowed(made, kept) for made in wordings(value, phrases, article))
    back = tuple(filled(t, {"{n}": n, "{s}": ""}) for t in frames.NOUN_BACK for n in phrases.nouns[:3])
    return Relation(
        f"more {name}", value, (), phrases.nouns[0], said, asked, back, invented=True, names=phrases.names,
        nouns=phrases.nouns, ways=(("noun", phrases.nouns), *phrases.ways),
    )  # fmt: skip


def _with_written(relation: Relation, block: Block, kept: frozenset[str]) -> Relation:
    """The relation with the wordings that were written for it, before those that are kept for measuring; its first
    question, which shows the article, stays the first."""
    first, *others = relation.questions
    return replace(
        relation,
        statements=(*_allowed(block.statements, kept), *relation.statements),
        questions=(first, *_allowed(block.questions, kept), *others),
        reverse=(*_allowed(block.reverse, kept), *relation.reverse),
    )


def _written(key: str, block: Block, kept: frozenset[str]) -> Relation:
    """A relation that was written out and is for training alone."""
    said, asked, back = (_allowed(x, kept) for x in (block.statements, block.questions, block.reverse))
    choices = choices_of(block.value)
    return Relation(
        f"written {key}", "choice" if choices else block.value, choices, block.noun, said, asked, back, invented=True,
        names=frozenset((block.noun,)), nouns=(block.noun,), ways=(("noun", (block.noun,)),),
    )  # fmt: skip


def _first(wordings: Iterator[str]) -> list[str]:
    return [wording for _, wording in zip(range(MOST_PER_TEMPLATE), wordings, strict=False)]


def _allowed(templates: Sequence[str], kept: frozenset[str]) -> tuple[str, ...]:
    return tuple(t for t in dict.fromkeys(templates) if plain(t) not in kept)


def wordings(value: str, phrases: Phrases, article: str) -> tuple[list[str], list[str]]:
    """Statements and questions out of phrases; ``article`` stands before the thing in the midst of a sentence."""
    open_ends = {"{s}": article + "{s}", **frames.words_of(value)}
    said = _fill(frames.NOUN_SAID, [{**open_ends, "{n}": n} for n in phrases.nouns])
    asked = _fill(frames.noun_asked(value), [{**open_ends, "{n}": n} for n in phrases.nouns])
    for way, words in phrases.ways:
        statements, questions = frames.of_way(way, value)
        slots = [{**open_ends, **verb(word), "{p}": way.split(" ")[-1]} for word in words]
        said += _fill(statements, slots)
        asked += _fill(questions, slots)
    return said, asked


def _fill(templates: Sequence[str], slots: Sequence[Mapping[str, str]]) -> list[str]:
    return [filled(template, words) for template in templates for words in slots]


def verb(word: str) -> Mapping[str, str]:
    """The forms of "write:wrote:written", of a regular verb (with what follows it), or of a word that has none."""
    base, _, rest = word.partition(":")
    head, space, tail = base.partition(" ")
    did, _, done = rest.partition(":") if rest else (past(head) + space + tail, "", past(head) + space + tail)
    return {"{v}": base, "{es}": third(head) + space + tail, "{ed}": did, "{en}": done, "{w}": base}
