"""Questions that only ask where passages stand: how the last begins, or the one behind another, or each in turn.

They are about whatever passages a context has, and teach what a list of first sentences needs: which one comes next.
None gives a passage's number, asks for it or counts: a model that numbers what it reads finds answers by the number,
and a segment that was encoded elsewhere has another one.
A "word" is what stands between white space; the last wording of each kind is kept for measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.requests import WAYS, WAYS_OF_ONE, made, numbered, of_split
from hypic_apps.train.schema import Split

KINDS = ("order", "order_sentence", "order_list")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
NUM_WORDS = (3, 4, 5)  # of a beginning that is asked for; one that is quoted may be longer, until it names one passage
LONGEST_QUOTE = 12
LONGEST_SENTENCE = 300  # characters; longer first sentences are asked for by their words alone
AT_END = ("the last passage", "the final passage", "the passage at the very end", "the last of the passages")
BEHIND = (
    'the passage after the one that begins with "{w}"', 'the passage that follows "{w}"',
    'the next passage after "{w}"', 'the passage behind the one that starts with "{w}"',
    'the passage that comes right after "{w}"', 'the passage that stands behind "{w}"',
    'the passage that comes directly after the one beginning "{w}"',
    'the passage following the one that opens with "{w}"',
)  # fmt: skip
BEFORE = (
    'the passage before the one that begins with "{w}"', 'the passage that is followed by "{w}"',
    'the passage right before the one that starts with "{w}"', 'the passage that precedes "{w}"',
)  # fmt: skip
SENTENCE = (
    *made(("the first sentence of {p}", "the opening sentence of {p}", "the sentence that begins {p}"),
          WAYS_OF_ONE, 80),
    "What is the first sentence of {p}?", "Which sentence stands first in {p}?", "What is the opening sentence of {p}?",
    "What sentence does {p} begin with?", "first sentence of {p}", "With which sentence does {p} start?",
)  # fmt: skip
WORDS = (
    *made(("the first {n} words of {p}", "the {n} words that begin {p}", "{n} words from the beginning of {p}"),
          WAYS_OF_ONE, 80),
    "What are the first {n} words of {p}?", "With which {n} words does {p} begin?", "first {n} words of {p}",
    "Which {n} words stand first in {p}?", "How does {p} begin? Give me {n} words.",
    "With what {n} words does {p} start?",
)  # fmt: skip
EVERY = (
    *made((
        "the first {n} words of each passage", "the first {n} words of every passage",
        "how each passage begins, {n} words each", "the {n} words that each passage begins with",
        "the opening {n} words of all passages",
    ), WAYS, 80),
    "What are the first {n} words of each passage?", "With which {n} words does each passage begin?",
    "first {n} words of all passages", "How do the passages begin? Give me {n} words of each, in order.",
    "Which {n} words does every passage start with?",
)  # fmt: skip
Maker = Callable[[Sequence[Passage], Split, Random], Ask | None]


def beginning(passage: Passage, num_words: int) -> str:
    """The first words of a passage, with one space between them."""
    return " ".join(passage.text.split(maxsplit=num_words)[:num_words])


def quoted(passages: Sequence[Passage], place: int, r: Random) -> str | None:
    """As many first words of a passage as no other has; nothing where that takes too many."""
    for num_words in range(r.choice(NUM_WORDS), LONGEST_QUOTE + 1):
        found = beginning(passages[place], num_words)
        if sum(beginning(p, num_words) == found for p in passages) == 1:
            return None if '"' in found else found
    return None


def pointed_at(passages: Sequence[Passage], split: Split, r: Random) -> tuple[str, int] | None:
    """Words that point at one of the passages by where it stands, and its index; nothing where they are not enough."""
    templates, place, beside = r.choice(list(_ways(r.randrange(len(passages)), len(passages) - 1)))
    words = "" if beside is None else quoted(passages, beside, r)
    if words is None:
        return None
    return r.choice(of_split(templates, split)).replace("{w}", words), place


def _ways(place: int, last: int) -> Iterator[tuple[Sequence[str], int, int | None]]:
    """How to point at a passage, or at one at the end: the words, the passage, and the one beside it that is quoted."""
    yield AT_END, last, None
    if place > 0:
        yield from [(BEHIND, place, place - 1)] * 3
    if place < last:
        yield BEFORE, place, place + 1


def one_of(passages: Sequence[Passage], split: Split, r: Random) -> Ask | None:
    """How one passage begins: its first sentence where that is short, or a few words."""
    found = pointed_at(passages, split, r)
    if found is None:
        return None
    where, place = found
    passage, number = passages[place], r.choice(NUM_WORDS)
    if r.random() < 0.5 and len(passage.first) <= LONGEST_SENTENCE and passage.text.startswith(passage.first):
        request = r.choice(of_split(SENTENCE, split)).replace("{p}", where)
        return Ask("order_sentence", request, passage.first, starts=(0,))
    request = r.choice(of_split(WORDS, split)).replace("{p}", where).replace("{n}", NUMBERS[number])
    return Ask("order", request, beginning(passage, number))


def every(passages: Sequence[Passage], split: Split, r: Random) -> Ask | None:
    """The first words of all passages, in order."""
    number = r.choice(NUM_WORDS[:2])
    request = r.choice(of_split(EVERY, split)).replace("{n}", NUMBERS[number])
    answer, starts = numbered([beginning(p, number) for p in passages])
    return Ask("order_list", request, answer, starts=starts)


MAKERS: Mapping[Maker, float] = {one_of: 6.0, every: 2.5}


def asks_of(passages: Sequence[Passage], split: Split, r: Random, number: int) -> list[Ask]:
    """At most ``number`` questions on the order of the passages, which are all that is shown, none answered twice."""
    chosen = r.choices(list(MAKERS), list(MAKERS.values()), k=number)
    found = [maker(passages, split, r) for maker in chosen]
    return list({(ask.kind, ask.answer): ask for ask in found if ask is not None}.values())
