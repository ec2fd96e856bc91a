"""The evaluation sets, made from seeds: each tests something that reuse of passages could break.

"HotpotQA-style" and the like name what a set resembles. None of them is that data set, and no number on one may be
compared with a number on the other. All things in S1-S6 are invented, so that nothing can be answered from memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hypic_apps.eval import calls, questions
from hypic_apps.eval.items import Form, Item
from hypic_apps.eval.pool import Pool
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.requests import LISTS
from hypic_apps.train.scenes import documents, key_facts, updates
from hypic_apps.train.world import World

SEED = 20_261
Found = tuple[Sequence[Passage], Sequence[Ask]]
Maker = Callable[[Pool, Random], Found]


@dataclass(frozen=True)
class Set:
    """``name`` as records have it; ``num_items`` of the full set; ``is_ordered`` keeps the order of the passages."""

    name: str
    title: str
    stands_for: str
    num_items: int
    form: Form
    make: Maker
    is_ordered: bool = False


def items(chosen: Set, pool: Pool, number: int) -> list[Item]:
    """The first ``number`` items; item ``i`` depends on the pool, the set's name and ``i`` alone."""
    return [next(_drawn(chosen, pool, i)) for i in range(number)]


def _drawn(chosen: Set, pool: Pool, number: int) -> Iterator[Item]:
    r = Random(f"{SEED}/{chosen.name}/{number}")
    while True:
        found, asks = chosen.make(pool, r)
        if not asks:
            continue
        ask, passages = r.choice(asks), list(found)
        if not chosen.is_ordered:
            r.shuffle(passages)
        yield Item(
            chosen.name, number, tuple(p.text for p in passages), ask.question, (ask.answer.split("\nAnswer: ")[-1],),
            gold_of(ask, passages), chosen.form,
        )  # fmt: skip


def gold_of(ask: Ask, passages: Sequence[Passage]) -> tuple[int, ...]:
    """The passages that state what the answer rests on."""
    facts = {(f.subject, f.relation.key, f.value) for f in ask.about}
    return tuple(
        number
        for number, passage in enumerate(passages)
        if any((f.subject, f.relation.key, f.value) in facts for f in passage.facts)
        or (not facts and ask in passage.asks)
    )


def world(pool: Pool, r: Random) -> World:
    """A world of the names and wordings that are kept for measuring."""
    return World(pool.names, pool.schema, "test", r, pool.library.sentences)


def one_hop(number: int) -> Maker:
    """One fact of one thing among ``number`` passages."""

    def make(pool: Pool, r: Random) -> Found:
        passages = world(pool, r).passages(number, 5)
        return passages, [a for p in passages for a in p.asks if _is_named(a)]

    return make


def _is_named(ask: Ask) -> bool:
    """The question names what it is about, so that passages of other things do not answer it."""
    return all(fact.subject.lower() in ask.question.lower() for fact in ask.about)


def two_hop(kind: str) -> Maker:
    """Two facts to be joined, both given, at random places among ten passages."""

    def make(pool: Pool, r: Random) -> Found:
        made = world(pool, r)
        passages = made.passages(10, 5)
        asks = [a for a in made.two_hop_asks(6) if a.kind == kind]
        return passages, [a for a in asks if len(gold_of(a, passages)) == 2]

    return make


def first_sentences(pool: Pool, r: Random) -> Found:
    """Invented passages or articles, of each the first sentence: a long answer."""
    number = r.randint(6, 8)
    if r.random() < 0.5:
        passages = world(pool, r).passages(number, 4)
    else:
        passages = [pool.library.article(a, r) for a in r.sample(pool.library.articles, number)]
    return passages, [key_facts(passages, LISTS[-1])]


def pieces(kind: str) -> Maker:
    """Two to four documents in four to eight pieces each, of which only the first names its subject."""

    def make(pool: Pool, r: Random) -> Found:
        passages = documents(world(pool, r), r.randint(2, 4), (4, 8))
        return passages, [a for p in passages for a in p.asks if a.kind == kind]

    return make


def notices(number: int) -> Maker:
    """Notices that overrule each other; each is long enough to be cached."""

    def make(pool: Pool, r: Random) -> Found:
        passages = updates(world(pool, r), number, filled=1.0)
        return passages, passages[-1].asks

    return make


def refusals(pool: Pool, r: Random) -> Found:
    """Half of the questions are answered by the passages, half are not."""
    made = world(pool, r)
    passages = made.passages(8, 5)
    if r.random() < 0.5:
        return passages, made.unstated_asks(2)
    return passages, [a for p in passages for a in p.asks if _is_named(a)]


def descriptions(pool: Pool, r: Random) -> Found:
    """Which of eight articles is described so? The description is a person's and mostly no copy of the text."""
    articles = pool.library.articles
    first = articles[r.randrange(len(articles))]
    passages = [pool.library.article(a, r) for a in [first, *r.sample([a for a in articles if a is not first], 7)]]
    shown = [p.text for p in passages]
    asks = [a for a in passages[0].asks if a.question.startswith("Which ")]
    # The description may stand in the passage's own head: then it would be a copy.
    return passages, [a for a in asks if a.question.split(": ", 1)[1].rstrip("?").lower() not in shown[0].lower()]


SETS: Mapping[str, Set] = {
    one.name: one
    for one in (
        Set("S1", "one hop, 16 passages", "TriviaQA-style", 2000, "short", one_hop(16)),
        Set("S2-direct", "two hops, 10 passages", "HotpotQA-style", 1000, "short", two_hop("2hop")),
        Set("S2-think", "two hops with a reasoning line", "HotpotQA-style", 1000, "reasoned", two_hop("2hop_think")),
        Set("S3", "first sentences of 6-8 passages", "MultiNews-style", 1000, "long", first_sentences, is_ordered=True),
        Set("S4", "documents in pieces", "GovReport-style", 1500, "short", pieces("chunked"), is_ordered=True),
        Set("S4-list", "all facts of a document in pieces", "GovReport-style", 500, "long", pieces("facts"), True),
        Set("S5", "the latest of 12 notices", "order of states", 2000, "short", notices(12), is_ordered=True),
        Set("S6", "half the answers are not stated", "refusals", 500, "refusal", refusals),
        Set("S8", "held-out articles by their description", "natural text", 700, "short", descriptions),
    )
}
CALLS, ASKED = calls.NAME, questions.NAME
# The ninth set is for models whose chat template knows tools: it is run when asked for.
DEFAULT = (*SETS, ASKED)
NAMES = (*DEFAULT, CALLS)
# Sets that are made in their own way: how many items, and their maker.
OTHERS: Mapping[str, tuple[int, Callable[[Pool, int], list[Item]]]] = {
    CALLS: (calls.NUM_ITEMS, calls.items),
    ASKED: (questions.NUM_ITEMS, questions.items),
}
NUM_SMOKE = 200


def hashes() -> Mapping[str, str]:
    """The SHA-256 of every full set, as committed."""
    rows = json.loads((Path(__file__).parent / "hashes.json").read_text(encoding="utf-8"))
    return {name: row["sha256"] for name, row in rows.items()}


def size(name: str) -> int:
    """How many items a set holds.

    Raises:
        KeyError: there is no such set.
    """
    return OTHERS[name][0] if name in OTHERS else SETS[name].num_items


def of(name: str, pool: Pool, number: int | None = None) -> list[Item]:
    """The first ``number`` items of a set, by default all.

    Raises:
        KeyError: there is no such set.
    """
    number = min(number or size(name), size(name))
    return OTHERS[name][1](pool, number) if name in OTHERS else items(SETS[name], pool, number)


def sweep(what: str, values: Sequence[int], pool: Pool, number: int) -> dict[str, list[Item]]:
    """One-hop items by number of passages (``segments``) or by their length in tokens (``lengths``)."""
    found = {}
    for value in values:
        make = one_hop(value) if what == "segments" else _of_length(value)
        named = Set(f"S1 {what} {value}", "", "", number, "short", make)
        found[named.name] = items(named, pool, number)
    return found


def by_place(found: Mapping[str, Sequence[Item]]) -> dict[str, list[Item]]:
    """The items of sets that rest on one passage each, as a set for every place where it stands, the first first."""
    out: dict[str, list[Item]] = {}
    for name, all_items in found.items():
        resting = [item for item in all_items if len(item.gold) == 1]
        for place in sorted({item.gold[0] for item in resting}):
            out[f"{name} place {place + 1}"] = [item for item in resting if item.gold[0] == place]
    return out


SEGMENTS, LENGTHS = (4, 8, 16, 32, 64), (32, 64, 128, 256, 512, 1024)
CHARACTERS_PER_TOKEN = 4


def _of_length(num_tokens: int) -> Maker:
    """Six passages of about so many tokens, filled up with real sentences on both sides of what is told."""

    def make(pool: Pool, r: Random) -> Found:
        passages, asks = one_hop(6)(pool, r)
        return [_filled(p, num_tokens * CHARACTERS_PER_TOKEN, pool, r) for p in passages], asks

    return make


def _filled(passage: Passage, length: int, pool: Pool, r: Random) -> Passage:
    text = passage.text
    while len(text) < length - 60:
        more = r.choice(pool.library.sentences)
        text = f"{text} {more}" if r.random() < 0.7 else f"{more} {text}"
    return Passage(text, passage.first, passage.asks, passage.facts)
