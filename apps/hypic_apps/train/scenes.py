"""Contexts of which no passage alone is enough: notices that overrule each other, documents in pieces, lists.

They are what can tell ways of reusing passages apart: where passages are independent, all ways look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypic_apps.train.passages import Ask, Fact, Passage, ask, said, sentences, state
from hypic_apps.train.requests import FACTS, LISTS, numbered, strung
from hypic_apps.train.world import World

NOTICES = ("project", "product", "company", "museum", "handbook", "meeting")
# How a document's later pieces call what only the first one names.
DESCRIPTIONS = {
    "person": "this person", "company": "the company", "city": "the town", "country": "the country",
    "book": "the book", "film": "the film", "museum": "the building", "project": "the project",
    "product": "the device", "festival": "the event", "club": "the club",
}  # fmt: skip


def updates(world: World, number: int, *, filled: float = 0.0) -> list[Passage]:
    """Notices that state the same few fields again and again; only the latest counts.

    A share ``filled`` of them goes on with sentences of real text.
    """
    r = world.r
    fields = [world.thing(r.choice(NOTICES), 2)[0] for _ in range(max(1, number // 3))]
    latest: dict[int, Fact] = {}
    passages: list[Passage] = []
    for notice in range(1, number + 1):
        which = r.randrange(len(fields))
        old = fields[which]
        fact = latest[which] = Fact(old.kind, old.subject, old.relation, world.names.value(old.relation, r))
        stated = sentences([fact], world.split, r)[0]
        text = r.choice([f"Notice {notice}. From now on: {stated}", f"Update {notice}: {stated}"])
        text += _filler(world, 2, 3) if r.random() < filled else ""
        passages.append(Passage(text, text, (), (fact,)))
    asks = tuple(
        Ask("update", f"According to the latest notice: {ask(fact, world.split, r).question}", fact.value, (fact,))
        for fact in latest.values()
    )
    return [*passages[:-1], Passage(passages[-1].text, passages[-1].first, asks, passages[-1].facts)]


def documents(world: World, number: int, pieces: tuple[int, int]) -> list[Passage]:
    """Long documents cut into pieces, in order: only the first piece of each names what it is about."""
    kinds = world.r.choices(list(DESCRIPTIONS), k=world.r.randint(1, max(1, number - 1)))
    return [piece for _ in range(number) for piece in _document(world, world.r.choice(kinds), pieces)]


def _document(world: World, kind: str, pieces: tuple[int, int]) -> list[Passage]:
    r, subject = world.r, world.name(kind)
    relations = world.relations(kind)
    chosen = r.sample(relations, min(len(relations), r.randint(*pieces)))
    facts = [Fact(kind, subject, relation, world.value(kind, relation)) for relation in chosen]
    world.facts += facts
    told = [sentences(facts[:1], world.split, r)[0], *(_without_name(fact, world, r) for fact in facts[1:])]
    title = subject[:1].upper() + subject[1:]
    heads = [r.choice([f"{title}. ", f"# {title}\n\n"]), *(r.choice(["", "", "(continued) "]) for _ in facts[1:])]
    asks = [(Ask("chunked", ask(fact, world.split, r).question, fact.value, (fact,)),) for fact in facts[1:]]
    listed, starts = strung(told, [""] * len(told))
    whole = Ask("facts", wording(FACTS, world, r).replace("{s}", subject), listed, tuple(facts), starts)
    return [
        Passage(head + text + _filler(world, 1, 3), text, found, (fact,))
        for head, text, found, fact in zip(heads, told, [(whole,), *asks], facts, strict=True)
    ]


def _without_name(fact: Fact, world: World, r: Random) -> str:
    return state(fact, DESCRIPTIONS[fact.kind], said(fact.relation, world.split, r), world.split)


def _filler(world: World, low: int, high: int) -> str:
    if not world.filler:
        return ""
    return "".join(" " + world.r.choice(world.filler) for _ in range(world.r.randint(low, high)))


def wording(templates: Sequence[str], world: World, r: Random) -> str:
    """A wording of a request; the last one is for ``test`` alone."""
    return r.choice(templates[:-1]) if world.split == "train" else templates[-1]


def key_facts(passages: Sequence[Passage], question: str = LISTS[0]) -> Ask:
    """The first sentence of every passage, in order."""
    listed, starts = numbered([p.first for p in passages])
    return Ask("keyfacts", question, listed, starts=starts)
