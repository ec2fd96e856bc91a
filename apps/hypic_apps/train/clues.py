"""Questions of which only the thing and the kind of value say what is asked: "Who mended X?" where X has one person.

Or the other way round: the text tells it in such words, and the question is a common one.
The words are any noun and verb of the dictionary, or made up, and have nothing to do with what is told. So unknown
words are no reason to say that something is not stated: the thing is looked up first, then a value of the kind that is
asked for. It is missing only if the thing has none of that kind, whatever others have. For training alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from hypic_apps.train import related
from hypic_apps.train.frames import (
    BY_ASKED,
    DOES_ASKED,
    IS_ASKED,
    MANY_ASKED,
    NOUN_ASKED_BY_KIND,
    filled,
    words_of,
)
from hypic_apps.train.passages import Ask, Fact, ask, made_up
from hypic_apps.train.schema import Relation
from hypic_apps.train.variety import UNINVENTED, article_of
from hypic_apps.train.words import past, plural, third

if TYPE_CHECKING:
    from hypic_apps.train.world import World

# Shares, in training: of one-hop questions that could be asked so, of relations that could be told so, of words in such
# questions that are made up, and of questions without an answer that are asked so.
CLUES, DISGUISED, MADE_UP, MISSING = 0.16, 0.14, 0.25, 0.3
UNITS = {"metres": "how many metres", "length": "how many kilometres", "area": "how many square kilometres"}
NAMED = tuple(t for t in (*BY_ASKED, *NOUN_ASKED_BY_KIND) if "{which}" in t)
FORMS: Mapping[str, Sequence[str]] = {
    "who": (*BY_ASKED, *NOUN_ASKED_BY_KIND), "where": (*IS_ASKED, *NOUN_ASKED_BY_KIND),
    "when": (*IS_ASKED, *NOUN_ASKED_BY_KIND), "how many": MANY_ASKED, "how much": DOES_ASKED, "how long": DOES_ASKED,
    "choice": DOES_ASKED, **dict.fromkeys(UNITS, DOES_ASKED),
}  # fmt: skip


def clue(value: str) -> str:
    """What a question can tell of a kind of value, by its question word or by naming the kind; or nothing."""
    if value in ("choice", *UNITS):
        return value
    words = words_of(value)
    if words["{which}"] == "number":
        return "how many"
    told = words["{which}"] if words["{q}"] == "what" else words["{q}"]
    return "" if told == "thing" else told


def ask_for(world: World, fact: Fact, *, impersonal: bool = False) -> Ask:
    """A one-hop question about the fact; in training now and then one in a related word, or in words that do not
    matter."""
    if not impersonal and (found := related.ask_for(world, fact)):
        return Ask("1hop", found, fact.value, (fact,))
    if world.split == "train" and not impersonal and world.r.random() < CLUES and is_only(world, fact):
        return Ask("1hop", question(world, fact.kind, fact.subject, fact.relation), fact.value, (fact,))
    return ask(fact, world.split, world.r, impersonal=impersonal)


def is_only(world: World, fact: Fact) -> bool:
    """Whether the kind of value is enough to tell the fact from all others of its thing."""
    told = clue(fact.relation.value)
    if world.inventor is None or fact.kind in UNINVENTED or not told:
        return False
    if told == "choice":
        return not fact.relation.invented
    return sum(f.subject == fact.subject and clue(f.relation.value) == told for f in world.facts) == 1


def disguised(world: World, kind: str, relations: Sequence[Relation]) -> list[Relation]:
    """The relations of a thing; now and then one of a kind of value that no other has is told in any words."""
    if world.inventor is None or kind in UNINVENTED:
        return list(relations)
    kinds = [clue(x.value) for x in relations]
    return [
        _told_otherwise(world, kind, x)
        if told and not x.key.startswith("invented") and kinds.count(told) == 1 and world.r.random() < DISGUISED
        else x
        for x, told in zip(relations, kinds, strict=True)
    ]


def _told_otherwise(world: World, kind: str, relation: Relation) -> Relation:
    """The relation with statements of an invented one, for values of the same kind."""
    assert world.inventor is not None, "such statements are only made where there is a dictionary"
    value = "product" if relation.choices else relation.value
    words = world.inventor.relation(world.r, article_of(kind), value)
    kept_back = () if relation.invented else relation.statements[-2:]
    return replace(relation, statements=(*words.statements, *kept_back), more_said=(), ways=())


def missing_clue(world: World, kind: str, subject: str, relations: Sequence[Relation]) -> str | None:
    """A question for a kind of value that the thing lacks and others have, if there is one."""
    if world.inventor is None or kind in UNINVENTED or any(f.value == subject for f in world.facts):
        return None
    own = [f.relation for f in world.facts if f.subject == subject]
    others = {clue(f.relation.value) for f in world.facts} - {clue(x.value) for x in own} - {"", "choice"}
    chosen = {f.relation.key for f in world.facts if f.relation.choices} - {x.key for x in own}
    found = [x for x in relations if clue(x.value) in others or x.key in chosen]
    return question(world, kind, subject, world.r.choice(found)) if found else None


def question(world: World, kind: str, subject: str, relation: Relation) -> str:
    """The question for a value of the relation's kind, in any words."""
    told = clue(relation.value)
    words = {**words_of(relation.value), **_words(world, world.r), "{be}": world.r.choice(("is", "was"))}
    if told == "how many":
        words["{w}"] = plural(words["{n}"])
    elif told in ("choice", *UNITS):
        asked = UNITS.get(told, f"what {world.r.choice(relation.nouns or (relation.noun,))}")
        words |= {"{q}": asked, "{Q}": asked.capitalize()}
    words |= {"{s}": article_of(kind) + subject, "{p}": "on" if relation.value == "date" else "in"}
    return filled(world.r.choice(FORMS.get(told, NAMED)), words)


def _words(world: World, r: Random) -> Mapping[str, str]:
    """A noun and a verb in all forms."""
    assert world.inventor is not None, "such questions are only made where there is a dictionary"
    known = world.inventor.nouns, world.inventor.verbs
    noun, verb = (made_up(r) if r.random() < MADE_UP else r.choice(words) for words in known)
    return {"{n}": noun, "{v}": verb, "{es}": third(verb), "{ed}": past(verb), "{en}": past(verb), "{w}": past(verb)}
