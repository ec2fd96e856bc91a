"""Invented relations: any noun or verb of the dictionary as what is told and asked about a thing.

"The {noun} of X is Y" with nouns and verbs drawn from WordNet teaches to match the words of a question with those of a
statement, whatever they are, instead of knowing ninety relations by heart. For training only; the sense is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

from hypic_apps.train.corpus import Gloss
from hypic_apps.train.frames import BY_ASKED, BY_SAID, NOUN_ASKED, NOUN_BACK, NOUN_SAID, filled, words_of
from hypic_apps.train.nearness import Near
from hypic_apps.train.related import Related
from hypic_apps.train.schema import Relation, Ways
from hypic_apps.train.thesaurus import Entry
from hypic_apps.train.words import is_regular, past, plural, present_participle, third

VALUES = (
    "person", "person", "company", "city", "city", "country", "year", "count", "count", "money", "price", "date",
    "code", "colour", "duration", "days", "metres", "weight", "clock", "room", "language", "minutes", "month",
    "product", "college", "prize", "software", "years",
)  # fmt: skip
VERB_SAID = (
    "{s} {ed} {o}.", "{s} {es} {o}.", "It was {s} that {ed} {o}.", "In the spring, {s} {ed} {o}.",
    "{o} was {ed} by {s}.", "For a long time {s} has {ed} {o}.", "Once a year {s} {es} {o}.",
    "As was reported, {s} {ed} {o}.", "{o} is {ed} by {s}.", "{s} never {ed} anything but {o}.",
    "What {s} {ed} was {o}.", "{s} promised to {v} {o}.", "{s} is said to {v} {o}.", "{s} went on to {v} {o}.",
    "People say that {s} {es} {o}.", "Without a word, {s} {ed} {o}.", "{s}, who {ed} {o}, is well remembered.",
)  # fmt: skip
VERB_ASKED = (
    "What did {s} {v}?", "What does {s} {v}?", "What was {ed} by {s}?", "What is it that {s} {ed}?",
    "Tell me what {s} {ed}.", "Which thing did {s} {v}?", "What is {s} said to {v}?", "{s} {ed} what?",
    "What has {s} {ed}?", "Do you know what {s} {es}?",
)  # fmt: skip
VERB_BACK = ("What {ed} {o}?", "By what was {o} {ed}?", "What is said to {v} {o}?", "Which of them {ed} {o}?")
WHERE = {"city": ("Where", "in"), "country": ("Where", "in"), "year": ("When", "in"), "date": ("When", "on")}
PLACED_SAID = (
    "{s} was {ed} {p} {o}.", "{s}, {ed} {p} {o}, is well known.", "It was {p} {o} that {s} was {ed}.",
    "Records show that {s} was {ed} {p} {o}.", "{p} {o}, {s} was {ed}.", "{s} had to be {ed} {p} {o}.",
    "They {ed} {s} {p} {o}.", "Somebody {ed} {s} {p} {o}.",
)  # fmt: skip
PLACED_ASKED = (
    "{w} was {s} {ed}?", "{w} did they {v} {s}?", "Tell me {l} {s} was {ed}.", "{s} was {ed} {l}?",
    "{w} did somebody {v} {s}?", "Do you know {l} {s} was {ed}?", "{w} was it that {s} was {ed}?",
)  # fmt: skip
COUNTED_SAID = (
    "{s} {es} {o} {n}.", "{s} has {o} {n}.", "There are {o} {n} at {s}.", "{o} {n} belong to {s}.",
    "{s} counts {o} {n}.", "In all, {s} {ed} {o} {n}.", "{s} lists {o} {n}.", "With {o} {n}, {s} is well provided.",
)  # fmt: skip
COUNTED_ASKED = (
    "How many {n} does {s} have?", "How many {n} are there at {s}?", "What is the number of {n} of {s}?",
    "How many {n} belong to {s}?", "Give the number of {n} of {s}.", "How many {n} did {s} {v}?",
)  # fmt: skip


# The share of relations that are asked for in another word than the one they are told in; of the words drawn, the share
# that have near ones, by which questions may ask instead (``related.py``).
OTHER_WORD, WITH_NEAR = 0.6, 0.75


class Inventor:
    """Draws relations from the words of a dictionary; ``without`` are words that it must not use.

    With ``synonyms``, most relations are asked for in another word than the one they are told in: one of the same
    meaning, of a wider one, or one made from it ("X {owns} Y": "What is the {property} of X?"). With ``near``, a table
    of near words, most words drawn have near ones, which ``related`` asks with.
    """

    def __init__(
        self, glosses: Sequence[Gloss], synonyms: Sequence[Entry] = (), without: frozenset[str] = frozenset(),
        near: Sequence[Near] = (),
    ) -> None:  # fmt: skip
        self.related = Related(near, synonyms, without)
        self.nouns = [noun for noun in _words(glosses, "n") if noun not in without]
        self.verbs = [verb for verb in _words(glosses, "v") if not verb.endswith(("ed", "ing")) and is_regular(verb)]
        self.known_nouns = [(e.word, found) for e in synonyms if (found := _other_nouns(e)) and e.word not in without]
        self.agents = [(e.word, found) for e in synonyms if (found := _agents(e))]
        self.known_verbs = [(e.word, *words) for e in synonyms if any(words := _other_verbs(e))]
        self.near_nouns, self.near_verbs = (
            [e.word for e in near if e.pos == p and e.word not in without and self.related.has_near(e.word, p)]
            for p in "nv"
        )

    @property
    def has_words(self) -> bool:
        """Whether the dictionary has both nouns and verbs."""
        return bool(self.nouns and self.verbs)

    def relation(self, r: Random, article: str = "", value: str = "") -> Relation:
        """A relation with all its wordings; ``article`` stands before the subject in the midst of a sentence, ``value``
        is the kind of value, by default any."""
        value = value or r.choice(VALUES)
        is_near = bool(self.near_nouns and self.near_verbs) and r.random() < WITH_NEAR
        if not is_near and self.known_nouns and self.known_verbs and r.random() < OTHER_WORD:
            return self._in_other_words(r, article, value)
        nouns, verbs = (self.near_nouns, self.near_verbs) if is_near else (self.nouns, self.verbs)
        noun, verb = r.choice(nouns), r.choice(verbs)
        slots = {**_verb(verb), "{n}": noun, "{s}": article + "{s}"}
        forms: tuple[Sequence[str], Sequence[str], Sequence[str]] = NOUN_SAID, NOUN_ASKED, NOUN_BACK
        way, word = "noun", noun
        if value == "count" and r.random() < 0.7:
            slots["{n}"], noun = plural(noun), f"number of {plural(noun)}"
            forms, way, word = (COUNTED_SAID, COUNTED_ASKED, ()), "many", slots["{n}"]
        elif value in WHERE and r.random() < 0.6:
            where, preposition = WHERE[value]
            slots |= {"{w}": where, "{l}": where.lower(), "{p}": preposition}
            noun = f"{'place' if where == 'Where' else value} of {present_participle(verb)}"
            forms, way, word = (PLACED_SAID, PLACED_ASKED, ()), f"was {preposition}", past(verb)
        elif value == "person" and is_near and r.random() < 0.5:
            forms, way, word = (BY_SAID, BY_ASKED, NOUN_BACK), "by", verb
            slots |= {**words_of(value)}
        elif r.random() < 0.4:
            forms, noun = (VERB_SAID, VERB_ASKED, VERB_BACK), present_participle(verb)
            way, word = "does", verb
        return _made(noun, verb, value, forms, slots, slots, r, ((way, (word,)),))

    def _in_other_words(self, r: Random, article: str, value: str) -> Relation:
        """Told with one word, asked for with another."""
        if value == "person" and self.agents and r.random() < 0.5:
            verb, doers = r.choice(self.agents)
            told, called = {**_verb(verb), "{s}": article + "{s}"}, {"{n}": r.choice(doers), "{s}": article + "{s}"}
            return _made(
                called["{n}"], verb, value, (BY_SAID, NOUN_ASKED, NOUN_BACK), told, called, r, (("by", (verb,)),)
            )
        if value == "person" or r.random() < 0.6:
            noun, others = r.choice(self.known_nouns)
            told, called = {"{n}": noun, "{s}": article + "{s}"}, {"{n}": r.choice(others), "{s}": article + "{s}"}
            return _made(noun, noun, value, (NOUN_SAID, NOUN_ASKED, NOUN_BACK), told, called, r, (("noun", (noun,)),))
        verb, verbs, nouns = r.choice(self.known_verbs)
        told, ways = {**_verb(verb), "{s}": article + "{s}"}, (("does", (verb,)),)
        if nouns and (not verbs or r.random() < 0.5):
            called = {"{n}": r.choice(nouns), "{s}": article + "{s}"}
            return _made(called["{n}"], verb, value, (VERB_SAID, NOUN_ASKED, NOUN_BACK), told, called, r, ways)
        called = {**_verb(r.choice(verbs)), "{s}": article + "{s}"}
        noun = r.choice(nouns) if nouns else present_participle(verb)
        return _made(noun, verb, value, (VERB_SAID, VERB_ASKED, VERB_BACK), told, called, r, ways)


MOST_USED = 3


def _made(
    noun: str, verb: str, value: str, forms: tuple[Sequence[str], Sequence[str], Sequence[str]],
    told: Mapping[str, str], called: Mapping[str, str], r: Random, ways: Ways,
) -> Relation:  # fmt: skip
    """A relation with a few of the wordings that the forms allow: it is used once or twice, so all would be a waste."""
    said, asked, back = (r.sample(form, min(len(form), MOST_USED)) for form in forms)
    return Relation(
        f"invented {noun} {verb}", value, (), noun,
        tuple(filled(t, told) for t in said), tuple(filled(t, called) for t in asked),
        tuple(filled(t, called) for t in back), invented=True,
        names=frozenset((noun, verb, *(called.get(place, noun) for place in ("{n}", "{v}")))), ways=ways,
    )  # fmt: skip


def _verb(verb: str) -> dict[str, str]:
    return {"{v}": verb, "{ed}": past(verb), "{en}": past(verb), "{es}": third(verb)}


def _other_nouns(entry: Entry) -> tuple[str, ...]:
    return (*entry.same, *entry.wider) if entry.pos == "n" and len(entry.word) > 3 else ()


def _agents(entry: Entry) -> tuple[str, ...]:
    """Those who do what a verb says: "own": "owner"."""
    if entry.pos != "v" or not is_regular(entry.word):
        return ()
    return tuple(word for word, pos in entry.made if pos == "n" and word.endswith(("er", "or")))


def _other_verbs(entry: Entry) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Verbs to ask with, and nouns made from the verb."""
    if entry.pos != "v" or not is_regular(entry.word):
        return (), ()
    made = (word for word, pos in entry.made if pos == "n" and not word.endswith(("er", "or", "ing")))
    return tuple(x for x in (*entry.same, *entry.wider) if is_regular(x)), tuple(made)


def _words(glosses: Sequence[Gloss], pos: str) -> list[str]:
    return sorted({g.word for g in glosses if g.pos == pos and re.fullmatch(r"[a-z]{4,11}", g.word)})
