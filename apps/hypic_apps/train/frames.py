"""How one tells and asks for a relation, whatever it is called: sentences with open places for its words.

``{n}`` is a noun, ``{v} {es} {ed} {en}`` are forms of a verb, ``{w}`` a participle or adjective with its preposition
``{p}``; ``{q}`` is how one asks for such a value ("in which city"), ``{which}`` its kind; ``{s}`` and ``{o}`` stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NOUN_SAID = (
    "The {n} of {s} is {o}.", "{s}'s {n} is {o}.", "{o} is the {n} of {s}.", "{s} has {o} as {n}.",
    "As {n}, {s} has {o}.", "For {s}, the {n} is given as {o}.", "The {n} given for {s} is {o}.",
    "{s} is listed with the {n} {o}.", "The {n} of {s} was changed to {o}.", "{s} ({n}: {o}) is on the list.",
    "Everybody knows that the {n} of {s} is {o}.", "In the case of {s}, {o} is the {n}.",
    "The list names {o} as the {n} of {s}.", "The {n} entered for {s} reads {o}.",
    "{s}, whose {n} is {o}, is well known.",
    "Under {n}, the entry for {s} says {o}.", "When asked for the {n} of {s}, people say {o}.", "{n} of {s}: {o}.",
    "It is {o} that is the {n} of {s}.", "{s} still has {o} as {n}.", "The {n}, in the case of {s}, is {o}.",
    "With {o} as {n}, {s} made the news.", "The current {n} of {s} is {o}.",
    "{o}, the {n} of {s}, has often been named.",
    "At the time of writing, the {n} of {s} was {o}.", "The {n} of {s} has been {o} for some time.",
    "What is called the {n} of {s} is {o}.", "{s} is best introduced by the {n}, {o}.", "{o} became the {n} of {s}.",
    "There is general agreement that the {n} of {s} is {o}.", "Our records show {o} as the {n} of {s}.",
    "{s} and the {n}, {o}, are mentioned in every guide.", "The {n} that {s} has is {o}.",
    "Nobody was surprised that {o} was named as the {n} of {s}.", "On paper, {o} is the {n} of {s}.",
    "The {n} of {s} used to be another one, but now it is {o}.", "Where {s} is concerned, the {n} is {o}.",
    "The {n} of {s}, which many ask for, is {o}.", "Let us not forget the {n} of {s}, {o}.",
)  # fmt: skip
NOUN_ASKED = (
    "What is the {n} of {s}?", "What is {s}'s {n}?", "Tell me the {n} of {s}.", "{s}: {n}?", "Name the {n} of {s}.",
    "What {n} is given for {s}?", "What is named as the {n} of {s}?", "What does {s} have as {n}?", "{s} {n}",
    "Do you know the {n} of {s}?", "{n} of {s}?", "{n} of {s}", "I am looking for the {n} of {s}.", "{s}'s {n}?",
    "With what {n} is {s} listed?", "What is the current {n} of {s}?", "Can you give me {s}'s {n}?", "{s}, {n}",
    "What do the passages say about the {n} of {s}?", "I would like to know the {n} of {s}.", "{n}, {s}",
    "What is known about the {n} of {s}?", "I'm reading about {s}. What is the {n}?", "About {s}: what is the {n}?",
    "Please look up the {n} of {s}.", "Does the text give the {n} of {s}?", "Find the {n} of {s}.",
)  # fmt: skip
NOUN_ASKED_BY_KIND = (
    "{Q} is the {n} of {s}?", "{Q} is {s}'s {n}?", "Which {which} is the {n} of {s}?", "Tell me {q} the {n} of {s} is.",
    "Do you know {q} {s}'s {n} is?", "The {n} of {s} is {q}?", "Can you tell me {q} the {n} of {s} is?",
    "I wonder {q} the {n} of {s} is.", "Which {which} is named as the {n} of {s}?",
    "Which {which} does {s} have as {n}?",
)  # fmt: skip
NOUN_BACK = ("What has {o} as {n}?", "Whose {n} is {o}?", "{o} is the {n} of what?", "Which of them has the {n} {o}?")
BY_SAID = (
    "{o} {ed} {s}.", "{s} was {en} by {o}.", "It was {o} who {ed} {s}.", "{s}, {en} by {o}, is well known.",
    "{s} has been {en} by {o}.", "The one who {ed} {s} is {o}.", "{o} has {en} {s}.", "{s} is {en} by {o}.",
    "{o}, who {ed} {s}, did not want to comment.", "People know {o} as the one who {ed} {s}.", "{o} {es} {s}.",
    "{en} by {o}, {s} has made its way.", "Nobody but {o} {ed} {s}.", "{s} was at last {en} by {o}.",
    "At first nobody wanted to {v} {s}; {o} did.", "{o} was asked to {v} {s}.",
    "{s}, which {o} {ed}, is much talked about.",
)  # fmt: skip
BY_ASKED = (
    "Who {ed} {s}?", "By whom was {s} {en}?", "Who was {s} {en} by?", "Tell me who {ed} {s}.", "Who {es} {s}?",
    "Do you know who {ed} {s}?", "Which {which} {ed} {s}?", "{s} was {en} by whom?", "Who has {en} {s}?",
    "Who is the one who {ed} {s}?", "By which {which} was {s} {en}?", "{s} {en} by", "who {ed} {s}",
    "I'm reading about {s}. Who {ed} it?", "Can you tell me by whom {s} was {en}?", "By whom is {s} {en}?",
    "Which {which} was it that {ed} {s}?", "Name the one who {ed} {s}.", "I wonder who {ed} {s}.",
)  # fmt: skip
DOES_SAID = (
    "{s} {es} {o}.", "{s} {ed} {o}.", "It is known that {s} {es} {o}.", "What {s} {es} is {o}.", "{s} used to {v} {o}.",
    "As was reported, {s} {ed} {o}.", "{s}, which {es} {o}, is well known.", "{s} is said to {v} {o}.",
    "In fact, {s} {es} {o}.", "By all accounts, {s} {es} {o}.", "{s} continues to {v} {o}.", "{s} has {en} {o}.",
)  # fmt: skip
DOES_ASKED = (
    "{Q} does {s} {v}?", "{Q} did {s} {v}?", "Tell me {q} {s} {es}.", "Do you know {q} {s} {es}?", "{s} {es} {q}?",
    "{Q} is {s} said to {v}?", "I would like to know {q} {s} {es}.", "Can you tell me {q} {s} {ed}?",
    "{q} does {s} {v}",
    "I'm reading about {s}. {Q} does it {v}?", "{Q} has {s} {en}?",
)  # fmt: skip
IS_SAID = (
    "{s} {be} {w} {p} {o}.", "{s}, {w} {p} {o}, is well known.", "It {be} {p} {o} that {s} {be} {w}.",
    "{w} {p} {o}, {s} is often mentioned.", "{p} {o}, {s} {be} {w}.", "Records show that {s} {be} {w} {p} {o}.",
    "{s}, which {be} {w} {p} {o}, has many friends.", "As far as is known, {s} {be} {w} {p} {o}.",
    "{s} is said to be {w} {p} {o}.", "That {s} {be} {w} {p} {o} is beyond doubt.", "{s} has been {w} {p} {o}.",
)  # fmt: skip
IS_ASKED = (
    "{Q} {be} {s} {w}?", "Tell me {q} {s} {be} {w}.", "{s} {be} {w} {q}?", "Do you know {q} {s} {be} {w}?",
    "{P} which {which} {be} {s} {w}?", "I wonder {q} {s} {be} {w}.", "{P} what {which} {be} {s} {w}?",
    "{q} {be} {s} {w}",
    "Can you tell me {q} {s} {be} {w}?", "Which {which} {be} {s} {w} {p}?", "I'm reading about {s}. {Q} {be} it {w}?",
    "{Q} was it that {s} {be} {w}?", "{s} {w} {p} which {which}?",
)  # fmt: skip
MANY_SAID = (
    "{s} has {o} {w}.", "There are {o} {w} at {s}.", "{s} counts {o} {w}.", "{o} {w} belong to {s}.",
    "With {o} {w}, {s} is well placed.", "In all, {s} has {o} {w}.", "The {w} of {s} number {o}.",
    "{s}, with {o} {w}, is no small matter.", "Those who counted found {o} {w} at {s}.", "{s} can boast {o} {w}.",
)  # fmt: skip
MANY_ASKED = (
    "How many {w} does {s} have?", "How many {w} are there at {s}?", "What is the number of {w} of {s}?",
    "How many {w} has {s}?", "Tell me how many {w} {s} has.", "{s} how many {w}", "How many {w} belong to {s}?",
    "Do you know how many {w} {s} has?", "number of {w} {s}", "I'm reading about {s}. How many {w} are there?",
    "Give the number of {w} of {s}.", "{s} has how many {w}?", "How many {w} does {s} count?",
)  # fmt: skip
HOW_SAID = ("{s} is {o} {w}.", "{s}, {o} {w}, stands out.", "{s} proved to be {o} {w}.", "At {o}, {s} is quite {w}.")
HOW_ASKED = (
    "How {w} is {s}?", "Tell me how {w} {s} is.", "Do you know how {w} {s} is?", "how {w} is {s}", "{s} is how {w}?",
    "How {w} exactly is {s}?", "Can you tell me how {w} {s} is?", "I'm reading about {s}. How {w} is it?",
)  # fmt: skip
# What a sentence may begin or end with that says nothing.
FRAMES = (
    "It is known that {}", "It is said that {}", "As far as we know, {}", "People say that {}", "It turns out that {}",
    "We have learned that {}", "As everybody knows, {}", "To be exact, {}", "By all accounts, {}", "In short, {}",
    "It should be noted that {}", "The report says that {}", "A note in the file says: {}", "As the press wrote, {}",
    "Let us add that {}", "Visitors are told that {}", "It has been confirmed that {}", "Some of you have asked: {}",
    "Remember that {}", "You may have heard that {}", "For the record: {}", "A reader writes that {}",
    "In a letter it says that {}", "There is no doubt that {}", "One more thing: {}", "Since last year, {}",
    "Although few people know it, {}", "As a neighbour told us, {}", "On a different note, {}", "Meanwhile, {}",
    "What is certain is that {}", "It is an open secret that {}", "Contrary to rumours, {}", "All the same, {}",
    "According to an old friend, {}", "After some discussion it became clear that {}", "In other words, {}",
    "If the papers are right, {}", "Unlike many others, {}", "As the website puts it, {}", "By the way, {}",
)  # fmt: skip
TAILS = (
    ", as the records show.", ", and that has not changed since.", ", which surprised some.", ", so the papers say.",
    ", though hardly anybody noticed.", ", among other things.", ", if the sources are right.", ", as is well known.",
    ", to the delight of many.", " (see below).", ", as an article explains.",
    ", and everybody seems to be happy with it.",
)  # fmt: skip
# For every kind of value: how one asks for it, and what it is.
PLACES = {"city": "city", "country": "country", "stadium": "place", "room": "room", "college": "university"}
TIMES = {"year": "year", "date": "day", "month": "month", "clock": "time"}
HOW_MUCH = {"price": "price", "money": "sum", "weight": "weight"}
HOW_LONG = dict.fromkeys(("duration", "days", "weeks", "months", "years", "minutes"), "time")


def words_of(value: str) -> Mapping[str, str]:
    """The question words of a kind of value, for the open places of frames."""
    if value == "person":
        return _asking("who", "person")
    for kinds, word in ((PLACES, "where"), (TIMES, "when"), (HOW_MUCH, "how much"), (HOW_LONG, "how long")):
        if value in kinds:
            return _asking(word, kinds[value])
    if value in ("metres", "length", "area", "count"):
        return _asking("how much", "number")
    known = ("company", "product", "museum", "river", "mountain", "club", "prize", "software", "language", "animal")
    return _asking("what", value if value in known else "thing")


def _asking(word: str, which: str) -> Mapping[str, str]:
    return {"{q}": word, "{Q}": word.capitalize(), "{which}": which}


def noun_asked(value: str) -> Sequence[str]:
    """Questions with a noun; asked by the kind of value where one can ("Who is the owner ...")."""
    by_kind = value in PLACES or value in TIMES or value in ("person", "company", "product")
    return (*NOUN_ASKED, *NOUN_ASKED_BY_KIND) if by_kind else NOUN_ASKED


def of_way(way: str, value: str) -> tuple[Sequence[str], Sequence[str]]:
    """Statements and questions of a way to tell a relation.

    Raises:
        ValueError: there is no such way.
    """
    known = {
        "by": (BY_SAID, BY_ASKED), "does": (DOES_SAID, DOES_ASKED), "many": (MANY_SAID, MANY_ASKED),
        "how": (HOW_SAID, HOW_ASKED),
    }  # fmt: skip
    if way in known:
        return known[way]
    be, _, preposition = way.partition(" ")
    if be not in ("is", "was") or not preposition:
        raise ValueError(
            f"no way {way!r} to tell a relation; there are by, does, many, how, 'is in', 'was in' and so on."
        )
    word = value in PLACES or value in TIMES
    said, asked = ([t.replace("{be}", be) for t in templates] for templates in (IS_SAID, IS_ASKED))
    return said, [t for t in asked if word or "{q}" not in t.lower()]


def filled(template: str, words: Mapping[str, str]) -> str:
    """The template with its words put in; ``{o}`` and, but for its article, ``{s}`` stay open."""
    text = re.sub(r"\{\w+\}", lambda found: _word(found.group(), words), template)
    return text[:1].upper() + text[1:]


def _word(place: str, words: Mapping[str, str]) -> str:
    if place == "{P}":
        return words["{p}"].capitalize()
    return words.get(place, place)
