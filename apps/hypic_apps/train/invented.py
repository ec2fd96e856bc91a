"""Invented relations: any noun or verb of the dictionary as what is told and asked about a thing.

"The {noun} of X is Y" with nouns and verbs drawn from WordNet teaches to match the words of a question with those of a
statement, whatever they are, instead of knowing ninety relations by heart. For training only; the sense is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from hypic_apps.train.corpus import Gloss
from hypic_apps.train.schema import Relation

VALUES = (
    "person", "person", "company", "city", "city", "country", "year", "count", "count", "money", "price", "date",
    "code", "colour", "duration", "days", "metres", "weight", "clock", "room", "language", "minutes", "month",
    "product", "college", "prize", "software", "years",
)  # fmt: skip
NOUN_SAID = (
    "The {n} of {s} is {o}.", "{s}'s {n} is {o}.", "{o} is the {n} of {s}.", "{s} has {o} as {n}.",
    "As {n}, {s} has {o}.", "For {s}, the {n} is given as {o}.", "The {n} given for {s} is {o}.",
    "With {o} as {n}, {s} stands out.", "The {n} that belongs to {s} is {o}.", "{s} is listed with the {n} {o}.",
    "The {n} of {s} was changed to {o}.", "Everybody knows that the {n} of {s} is {o}.", "{s}: {n} {o}.",
    "In the case of {s}, {o} is the {n}.", "The list names {o} as the {n} of {s}.", "{s} chose {o} as {n}.",
    "The {n} entered for {s} reads {o}.", "Under {n}, the entry for {s} says {o}.", "{o} serves as {n} of {s}.",
    "When asked for the {n} of {s}, people say {o}.", "{s}, whose {n} is {o}, was mentioned twice.",
    "It is {o} that is the {n} of {s}.", "{s} came with {o} for its {n}.", "The {n} in question, that of {s}, is {o}.",
)  # fmt: skip
NOUN_ASKED = (
    "What is the {n} of {s}?", "What is {s}'s {n}?", "Which {n} does {s} have?", "Tell me the {n} of {s}.",
    "{s}: {n}?", "Name the {n} of {s}.", "What {n} is given for {s}?", "What is named as the {n} of {s}?",
    "What does {s} have as {n}?", "Do you know the {n} of {s}?", "What was chosen as {n} by {s}?",
    "{n} of {s}?", "What serves as the {n} of {s}?", "I am looking for the {n} of {s}.", "With what {n} is {s} listed?",
)  # fmt: skip
NOUN_BACK = ("What has {o} as {n}?", "Whose {n} is {o}?", "{o} is the {n} of what?", "Which of them has the {n} {o}?")
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


class Inventor:
    """Draws relations from the words of a dictionary."""

    def __init__(self, glosses: Sequence[Gloss]) -> None:
        self.nouns = _words(glosses, "n")
        self.verbs = [verb for verb in _words(glosses, "v") if not verb.endswith(("ed", "ing"))]

    @property
    def has_words(self) -> bool:
        """Whether the dictionary has both nouns and verbs."""
        return bool(self.nouns and self.verbs)

    def relation(self, r: Random, article: str = "") -> Relation:
        """A relation with all its wordings; ``article`` stands before the subject in the midst of a sentence."""
        noun, verb, value = r.choice(self.nouns), r.choice(self.verbs), r.choice(VALUES)
        words = {"{n}": noun, "{v}": verb, "{ed}": past(verb), "{es}": third(verb), "{s}": article + "{s}"}
        forms: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = NOUN_SAID, NOUN_ASKED, NOUN_BACK
        if value == "count" and r.random() < 0.7:
            words["{n}"] = noun = plural(noun)
            forms = COUNTED_SAID, COUNTED_ASKED, ()
        elif value in WHERE and r.random() < 0.6:
            where, preposition = WHERE[value]
            words |= {"{w}": where, "{l}": where.lower(), "{p}": preposition}
            forms = PLACED_SAID, PLACED_ASKED, ()
        elif r.random() < 0.4:
            forms = VERB_SAID, VERB_ASKED, VERB_BACK
        said, asked, back = (tuple(filled(template, words) for template in form) for form in forms)
        key = f"invented {noun} {verb}"
        return Relation(key, value, (), noun, said, asked, back, invented=True)


def filled(template: str, words: dict[str, str]) -> str:
    """The template with its words put in; ``{o}`` and, but for its article, ``{s}`` stay open."""
    text = re.sub(r"\{\w+\}", lambda found: words.get(found.group(), found.group()), template)
    return text[:1].upper() + text[1:]


def past(verb: str) -> str:
    """The regular past of a verb."""
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if re.search(r"[^aeiou]y$", verb) else verb + "ed"


def third(verb: str) -> str:
    """The third person of a verb."""
    return plural(verb)


def plural(noun: str) -> str:
    """The regular plural of a noun."""
    if re.search(r"(s|x|z|ch|sh)$", noun):
        return noun + "es"
    return noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"


def _words(glosses: Sequence[Gloss], pos: str) -> list[str]:
    return sorted({g.word for g in glosses if g.pos == pos and re.fullmatch(r"[a-z]{4,11}", g.word)})
