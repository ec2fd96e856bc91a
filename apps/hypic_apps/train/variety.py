"""What makes a training world harder and more various than one to be graded on: relations that only training has,
several of one kind of value in one thing, passages about several things, names in passing, near misses.

For training alone: worlds of names kept for measuring never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from hypic_apps.train.passages import Fact, Passage, named, side_by_side, table
from hypic_apps.train.schema import Relation
from hypic_apps.train.sentences import first_sentence

if TYPE_CHECKING:
    from hypic_apps.train.world import World

# Shares, in training: of things with invented relations, and of passages that go on from an earlier one.
INVENTED, BRIDGED = 0.3, 0.5
# In training too: of things whose facts are of one kind of value, of passages about several things, of passages that
# name a thing they are not about, and of relations that only training has.
RIVALS, ROSTERS, MENTIONED, FURTHER = 0.3, 0.08, 0.08, 0.25
# Of near misses, those of a kind of value that the thing has: as a rule, they would teach to refuse whatever is told in
# unknown words. Of plain ones of a kind of value that it has none of, those that are asked.
NEAREST, VALUELESS = 0.12, 0.5
# Relations of which another thing's passage may tell, so their absence cannot be asked for.
IMPLIED = frozenset({"spouse", "country", "lifespan", "birth_year", "death_year", "twin", "role"})
UNINVENTED = ("task", "handbook", "meeting", "rules")
# In training: of worlds in which names are like others, of names in them that are; what names of these kinds go on
# with: no coined name ends so, and none that is kept for measuring can come of it.
CROWDED, RESEMBLING = 0.1, 0.4
EXTENDED = ("person", "company", "city", "country", "river")
MORE = ("uri", "eno", "ski", "aba", "inho", "sen", "ovic", "etti", "aw", "olo", "ik", "ema", "adu", "ist", "yan")
MENTIONS = (
    "More about {s} on another page.", "See also the notes on {s}.", "The same was asked about {s}.",
    "There is no connection with {s}.", "The next page is about {s}.", "Readers of this page also looked for {s}.",
    "Compare the entry on {s}.", "{s}, on the other hand, is another matter.", "We will come back to {s} later.",
)  # fmt: skip


def varied(world: World, kind: str, chosen: Sequence[Relation], most: int) -> list[Relation]:
    """The relations with some exchanged for ones that only training has: further ones, invented ones, and now and
    then several of one kind of value, so that only the words tell them apart."""
    out = [further(world, kind) if world.r.random() < FURTHER else x for x in chosen]
    if world.inventor is not None and kind not in UNINVENTED and world.r.random() < INVENTED:
        place = world.r.randint(0, len(out))
        out[place : place + world.r.randint(0, 1)] = [
            world.inventor.relation(world.r, article_of(kind)) for _ in range(world.r.randint(1, 2))
        ]
    if most > 3 and world.r.random() < RIVALS:
        out += rivals(world, kind, world.r.choice(out).value)
    return told_apart(out)


def further(world: World, kind: str) -> Relation:
    """A relation of the kind that only training has, if there are such."""
    every = world.relations(kind)
    return world.r.choice([x for x in every if x.invented] or every)


def rivals(world: World, kind: str, value: str) -> list[Relation]:
    """Further relations of a kind of value: of the kind of thing, or invented."""
    found = [x for x in world.relations(kind) if x.value == value != "choice"]
    out = world.r.sample(found, min(len(found), 2))
    if world.inventor is not None and kind not in UNINVENTED and value != "choice" and world.r.random() < 0.6:
        out.append(world.inventor.relation(world.r, article_of(kind), value))
    return out


def resembling(world: World, kind: str, made: str) -> str:
    """The name or, often, one like another of this world: with its first or last name, or going on from its end."""
    known = list(dict.fromkeys(n for f in world.facts for n in names_of(f, kind)))
    if kind not in EXTENDED or not known or world.r.random() >= RESEMBLING:
        return made
    other = world.r.choice(known)
    if kind == "person" and world.r.random() < 0.6:
        (own, _, family), (others, _, others_family) = made.partition(" "), other.partition(" ")
        return f"{own} {others_family}" if world.r.random() < 0.5 else f"{others} {family}"
    return longer(other, kind, world.r)


def names_of(fact: Fact, kind: str) -> tuple[str, ...]:
    """The names of things of a kind that a fact has in it."""
    own = (fact.subject,) if fact.kind == kind else ()
    return (*own, fact.value) if fact.relation.value == kind else own


def longer(name: str, kind: str, r: Random) -> str:
    """The name with its last word going on, or the one before where the last says what kind of thing it is."""
    words = name.split(" ")
    words[-2 if kind == "company" and len(words) > 1 else -1] += r.choice(MORE)
    return " ".join(words)


def mention(world: World) -> str:
    """A sentence that names some thing of this world and says nothing of it."""
    fact = world.r.choice([f for f in world.facts if f.kind not in ("task", "handbook")] or world.facts)
    return world.r.choice(MENTIONS).replace("{s}", named(fact))


def roster(world: World, kind: str) -> Passage:
    """A passage that tells the same one or two relations of several things, in sentences or as a table."""
    relations = world.r.sample(world.relations(kind), world.r.randint(1, 2))
    relations = [x for x in relations if x.key != "lifespan"] or [further(world, kind)]
    names = [world.name(kind) for _ in range(world.r.randint(2, 4))]
    facts = [Fact(kind, name, x, world.value(kind, x)) for name in names for x in relations]
    world.facts += facts
    text = table(facts, world.r) if world.r.random() < 0.4 else side_by_side(facts, world.split, world.r)
    asks = tuple(world.ask(fact) for fact in facts)
    return Passage(text, first_sentence(text), asks, tuple(facts))


def missing(world: World, kind: str, subject: str, relations: Sequence[Relation]) -> list[Relation]:
    """Of relations that a thing lacks, those that none of its own could be meant by; mostly only ones that another
    thing has, or whose kind of value one of its own has, of which there are few: there only the words tell."""
    own = [f.relation for f in world.facts if f.subject == subject]
    if world.inventor is not None and kind not in UNINVENTED and world.r.random() < INVENTED / 3:
        relations = [world.inventor.relation(world.r, article_of(kind))]
    free = [x for x in relations if not any(is_alike(x, o) or are_near(world, x, o) for o in own)]
    others = {f.relation.key for f in world.facts if f.kind == kind}
    values = {x.value for x in own} - {"choice"}
    near = [x for x in free if x.value in values]
    hard = near if world.r.random() < NEAREST else [x for x in free if x.key in others and x.value not in values]
    return hard if hard and world.r.random() < 0.8 else free


def lacking(world: World, kind: str, subject: str) -> list[Relation]:
    """Plain relations that a thing lacks and others of its kind have: the nearest that a passage can miss.

    None for whose kind of value the thing has one told in any words, which the question might mean.
    """
    plain = {id(x) for x in world.schema[kind] if not x.invented}
    own = [f.relation for f in world.facts if f.subject == subject]
    strange = {x.value for x in own if id(x) not in plain}
    others = {id(f.relation): f.relation for f in world.facts if f.kind == kind and id(f.relation) in plain}
    near = [x for x in others.values() if x.value not in strange and x.key not in IMPLIED]
    return [x for x in near if not any(is_alike(x, o) or is_alike(o, x) or are_near(world, x, o) for o in own)]


def is_worth_asking(world: World, subject: str, relation: Relation) -> bool:
    """Whether to ask for what a thing lacks: by chance, where it has none of that kind of value, since to refuse then
    takes no reading of the words."""
    values = {f.relation.value for f in world.facts if f.subject == subject}
    return relation.value in values or world.r.random() < VALUELESS


def bridging(world: World, first: Fact) -> str:
    """The noun by which a question leads from a thing to its value; in training any that the relation goes by."""
    nouns = first.relation.nouns if world.split == "train" and world.r.random() < 0.3 else ()
    return world.r.choice(nouns) if nouns else first.relation.noun


def told_apart(relations: Sequence[Relation]) -> list[Relation]:
    """The relations without any that goes by a name of an earlier one: a question could mean both."""
    out: list[Relation] = []
    for relation in relations:
        if not any(is_alike(relation, earlier) or is_alike(earlier, relation) for earlier in out):
            out.append(relation)
    return out


def is_alike(one: Relation, other: Relation) -> bool:
    """Whether a question for one relation might be taken to ask for the other."""
    if one.key == "lifespan" and other.key in ("birth_year", "death_year"):
        return True
    return one.key == other.key or not one.names.isdisjoint(other.names)


def are_near(world: World, one: Relation, other: Relation) -> bool:
    """Whether a question for one relation might be one for the other, in a related word (``related.py``)."""
    return world.inventor is not None and world.inventor.related.are_near(one, other)


def article_of(kind: str) -> str:
    """The article that names of a kind take within a sentence."""
    return "the " if kind in ("river", "animal", "product") else ""
