"""Questions in related words: "How much did X earn?" where the text tells the revenue of X.

The word to ask with is near in meaning to what is told (``nearness.py``), and clearly less near to anything else that
is told of the same thing: so what is asked for is the nearest in meaning. Some facts are told in a related word
instead, and asked plainly. For training alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from hypic_apps.train import frames
from hypic_apps.train.frames import filled
from hypic_apps.train.grammar import FOLDER, kept_back, plain, verb
from hypic_apps.train.nearness import Floats, Near, is_form, matrix
from hypic_apps.train.passages import Fact
from hypic_apps.train.schema import Relation, Ways
from hypic_apps.train.thesaurus import UNWANTED, Entry
from hypic_apps.train.variety import UNINVENTED, article_of
from hypic_apps.train.words import past, plural

if TYPE_CHECKING:
    from hypic_apps.train.world import World

# Shares, in training: of questions on invented relations, and on others, that are asked in a related word where there
# is one, and of relations that are told in one.
INVENTED, KNOWN, TOLD = 0.6, 0.2, 0.06
# How near (as a cosine) the word must be to all that the relation is called, and how much nearer than to anything else
# told of the thing.
LEAST, LEAST_OF_MANY, MARGIN = 0.62, 0.5, 0.15
NOT_ASKED = frozenset((*UNINVENTED, "rules")) - {"meeting"}
MOST_WORDS = 12
# How many relations are remembered with their words: invented ones are many, and met once.
MOST_KNOWN = 20_000
# Kinds of values of which a noun is also asked by a verb: "How much did X earn?" for the revenue of X.
BY_VERB = ("money", "price")


# Near to some relation that is known, and not what it means.
UNFIT = FOLDER / "unfit.txt"


@dataclass(frozen=True)
class Choice:
    """A word to speak of a relation with: n or v, the way in which it does, and how near it is."""

    word: str
    pos: str
    way: str
    nearness: float


class Related:
    """Draws related words out of a table of near ones; ``without`` are words that it must not use."""

    def __init__(
        self, table: Sequence[Near], synonyms: Sequence[Entry] = (), without: frozenset[str] = frozenset()
    ) -> None:
        self.table, self.without = table, without
        self._vectors: Floats = matrix(table) if table else np.zeros((0, 1), np.float32)
        self._places = {(entry.word, entry.pos): place for place, entry in enumerate(table)}
        self._pasts = {past(entry.word): entry.word for entry in table if entry.pos == "v"}
        self._same: dict[str, set[str]] = {}
        for one, other in ((entry.word, word) for entry in synonyms for word in entry.same):
            self._same.setdefault(one, set()).add(other)
            self._same.setdefault(other, set()).add(one)
        self._choices: dict[tuple[Ways, str], tuple[Choice, ...]] = {}
        self._words: dict[tuple[Ways, frozenset[str], str], tuple[frozenset[str], list[int]]] = {}
        self._pairs: dict[tuple[Ways, Ways], bool] = {}
        lines = UNFIT.read_text(encoding="utf-8").splitlines()
        self._unfit = frozenset(word for line in lines if not line.startswith("#") for word in line.split())
        self._frozen: frozenset[str] | None = None

    def near(self, word: str, pos: str) -> tuple[tuple[str, str, float], ...]:
        """The words nearest to one, each with its part of speech and cosine; none of an unknown word."""
        place = self._places.get((word, pos))
        if place is None:
            return ()
        found = [self.table[i] for i in self.table[place].nearest]
        cosines = self._vectors[list(self.table[place].nearest)] @ self._vectors[place]
        return tuple((x.word, x.pos, float(c)) for x, c in zip(found, cosines, strict=True))

    def has_near(self, word: str, pos: str) -> bool:
        """Whether a fact told in the word may be asked for in another of its part of speech."""
        return any(kind == pos and cosine >= LEAST for _, kind, cosine in self.near(word, pos))

    def question(self, world: World, fact: Fact) -> str | None:
        """A question for the fact in a related word, where one tells it from all else that is told of its thing."""
        found = None if fact.kind in NOT_ASKED else self.choice(fact.relation, _others(world, fact), world.r)
        if found is None:
            return None
        value = fact.relation.value
        template = filled(world.r.choice(_asked(found, value)), _slots(found, value, article_of(fact.kind)))
        return None if plain(template) in self._kept(world) else template.replace("{s}", fact.subject)

    def told(self, world: World, kind: str, relations: Sequence[Relation]) -> list[Relation]:
        """The relations of a thing, of which now and then one is told in a related word, to be asked plainly."""
        return [
            self._told(world, kind, x, [o for o in relations if o is not x])
            if kind not in NOT_ASKED and world.r.random() < TOLD
            else x
            for x in relations
        ]

    def choice(self, relation: Relation, others: Sequence[Relation], r: Random) -> Choice | None:
        """A word near the relation and clearly less near to each of the others; nothing if there is none."""
        found = self.choices(relation)
        first = r.randrange(len(found)) if found else 0
        return next((x for x in (*found[first:], *found[:first]) if self.is_nearest(x, others)), None)

    def is_nearest(self, choice: Choice, others: Sequence[Relation]) -> bool:
        """Whether the word is less near to all of the others by the margin, and goes by no name of theirs."""
        called = [self._called(other) for other in others]
        places = [place for _, found in called for place in found]
        own = self._vectors[self._places[choice.word, choice.pos]]
        if places and float((self._vectors[places] @ own).max()) > choice.nearness - MARGIN:
            return False
        same, head = self._same.get(choice.word, set()), choice.word[:3]
        return not any(
            not same.isdisjoint(words) or any(is_form(choice.word, w) for w in words if w[:3] == head)
            for words, _ in called
        )

    def are_near(self, one: Relation, other: Relation) -> bool:
        """Whether a question for one relation might mean the other: their values are of the same kind, and their words
        near each other."""
        if one.value != other.value:
            return False
        place = one.ways, other.ways
        if place not in self._pairs:
            if len(self._pairs) > MOST_KNOWN:
                self._pairs.clear()
            rows, columns = (
                [self._places[x] for way, words in ways for x in self._known(way, words)] for ways in place
            )
            cosines = self._vectors[rows] @ self._vectors[columns].T
            self._pairs[place] = bool(cosines.size) and float(cosines.max()) >= LEAST
        return self._pairs[place]

    def choices(self, relation: Relation) -> tuple[Choice, ...]:
        """Words near all that the relation is called, the nearest first."""
        place = relation.ways, relation.value
        if not relation.ways:
            return ()
        if place not in self._choices:
            if len(self._choices) > MOST_KNOWN:
                self._choices.clear()
            found = sorted(set(self._found(relation)), key=lambda x: (-x.nearness, x.word, x.pos, x.way))
            self._choices[place] = tuple(found[:MOST_WORDS])
        return self._choices[place]

    def _found(self, relation: Relation) -> Iterator[Choice]:
        ways = dict(relation.ways)
        known = {way: self._known(way, words) for way, words in ways.items()}
        places = [self._places[place] for found in known.values() for place in found]
        if not places:
            return
        names = {word for _, words in relation.ways for name in words for word in name.replace(":", " ").split()}
        unfit = frozenset() if relation.key.startswith("invented") else self._unfit
        centre = self._vectors[places].sum(0)
        centre = centre / np.linalg.norm(centre)
        least = LEAST if len(set(places)) == 1 else LEAST_OF_MANY
        for way, words in ((way, words) for way, words in known.items() if words):
            spoken = {pos: _way(way, words[0][1], pos, relation.value) for pos in "nv"}
            near = {(w, pos) for place in words for w, pos, _ in self.near(*place) if spoken[pos]}
            for word, pos in sorted(near):
                nearness = float(self._vectors[self._places[word, pos]] @ centre)
                if nearness >= least and word not in unfit and self._may_ask(word, names):
                    yield Choice(word, pos, spoken[pos], nearness)

    def _called(self, relation: Relation) -> tuple[frozenset[str], list[int]]:
        """All words of what a relation is called, and the places of those that the table has, plurals ("employees")
        and pasts ("founded") by their plain forms."""
        place = relation.ways, relation.names, relation.noun
        if place not in self._words:
            if len(self._words) > MOST_KNOWN:
                self._words.clear()
            words = _words(relation)
            plain_forms = {x for way, told in relation.ways for x in self._known(way, told)}
            known = {(w, p) for w in words for p in "nv" if (w, p) in self._places} | plain_forms
            self._words[place] = words, [self._places[x] for x in sorted(known)]
        return self._words[place]

    def _may_ask(self, word: str, names: set[str]) -> bool:
        return word not in self.without and word not in UNWANTED and not any(is_form(word, name) for name in names)

    def _known(self, way: str, words: Sequence[str]) -> list[tuple[str, str]]:
        """Those of the words that the table has, each as a noun or a verb."""
        out = []
        for word in (word.partition(":")[0] for word in words):
            if way in ("noun", "many"):
                out += [(word if way == "noun" else _singular(word), "n")]
            else:
                out += [(self._pasts.get(word, word), "v")]
        return [place for place in out if place in self._places]

    def _told(self, world: World, kind: str, relation: Relation, others: Sequence[Relation]) -> Relation:
        found = self.choice(relation, others, world.r)
        if found is None:
            return relation
        kept, frozen = self._kept(world), () if relation.invented else relation.statements[-2:]
        forms, slots = _said(found, relation.value), _slots(found, relation.value, article_of(kind))
        made = (filled(t, slots) for t in world.r.sample(forms, min(len(forms), 3)))
        said = tuple(t for t in made if plain(t) not in kept)
        if not said:
            return relation
        return replace(
            relation, statements=(*said, *frozen), more_said=(), ways=(), names=relation.names | {found.word}
        )

    def _kept(self, world: World) -> frozenset[str]:
        """The wordings that are for measuring only."""
        if self._frozen is None:
            known = {kind: tuple(x for x in found if not x.invented) for kind, found in world.schema.items()}
            self._frozen = kept_back(known)
        return self._frozen


def ask_for(world: World, fact: Fact) -> str | None:
    """In training, for a share of facts, a question in a related word."""
    if world.inventor is None or world.split != "train":
        return None
    share = INVENTED if fact.relation.key.startswith("invented") else KNOWN
    return world.inventor.related.question(world, fact) if world.r.random() < share else None


def told(world: World, kind: str, relations: Sequence[Relation]) -> list[Relation]:
    """The relations of a thing; in training now and then one is told in a related word."""
    if world.inventor is None or world.split != "train":
        return list(relations)
    return world.inventor.related.told(world, kind, relations)


def _others(world: World, fact: Fact) -> list[Relation]:
    return [f.relation for f in world.facts if f.subject == fact.subject and f.relation is not fact.relation]


def _words(relation: Relation) -> frozenset[str]:
    names = (*relation.names, relation.noun, *(word for _, words in relation.ways for word in words))
    return frozenset(w for name in names for w in name.replace(":", " ").split() if len(w) > 3 or w == name)


def _way(way: str, told: str, pos: str, value: str) -> str:
    """The way to speak of a relation in a word of a part of speech, told in another; nothing where there is none."""
    if told == pos:
        return way
    if pos == "v":
        return "does" if way == "noun" and value in BY_VERB else ""
    return ""


def _asked(choice: Choice, value: str) -> Sequence[str]:
    """Forms of questions in the word."""
    return frames.noun_asked(value) if choice.way == "noun" else frames.of_way(choice.way, value)[1]


def _said(choice: Choice, value: str) -> Sequence[str]:
    """Forms of statements in the word."""
    return frames.NOUN_SAID if choice.way == "noun" else frames.of_way(choice.way, value)[0]


def _slots(choice: Choice, value: str, article: str) -> Mapping[str, str]:
    words = {**frames.words_of(value), "{s}": article + "{s}", "{p}": choice.way.split(" ")[-1]}
    if choice.pos == "v":
        return {**words, **verb(choice.word), "{w}": past(choice.word)}
    return {**words, "{n}": choice.word, "{w}": plural(choice.word)}


def _singular(word: str) -> str:
    return word.removesuffix("ies") + "y" if word.endswith("ies") else word.removesuffix("s")
