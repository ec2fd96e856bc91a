"""Exact copying of a long span: the sentence that begins so, that mentions this, that comes next; a whole passage.

Every question names its span by words that occur in one place of all that is shown, so there is one right answer, and
that stands in the text as it is asked for. The last wording of each kind is kept for measuring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random

from hypic_apps.train import order
from hypic_apps.train.natural import NAME
from hypic_apps.train.passages import Ask, Passage, named
from hypic_apps.train.requests import WAYS_OF_ONE, made, of_split
from hypic_apps.train.schema import Split
from hypic_apps.train.sentences import parts
from hypic_apps.train.variety import UNINVENTED

KIND = "quote"
VERBS = (
    "Quote", "Copy", "Repeat", "Write out", "Give", "Show me", "Read out", "Reproduce", "Type out", "Recite", "Print",
    "Copy out", "Return", "Give me", "Put down", "Write down",
)  # fmt: skip
# Characters of an answer, about 8 to 120 tokens; words that name a sentence, and how many it must have besides.
LENGTHS = (36, 420)
NUM_WORDS, MOST_WORDS, REST = (3, 4, 5), 9, 6
TRIES = 3
BEGINS = (
    *made(('the sentence that begins with "{w}"', 'the whole sentence that starts with "{w}"',
           'the sentence beginning "{w} ..."'), WAYS_OF_ONE, 12, VERBS),
    'Which sentence begins with "{w}"?', 'What is the sentence that starts with "{w}"?',
    'How does the sentence that begins with "{w}" read in full?', 'sentence beginning with "{w}"',
    'Which of the sentences opens with "{w}"?',
)  # fmt: skip
MENTIONS = (
    *made(("the sentence that mentions {w}", "the sentence in which {w} occurs", "the only sentence with {w} in it"),
          WAYS_OF_ONE, 12, VERBS),
    "Which sentence mentions {w}?", "Where is {w} mentioned? Quote the sentence.", "In which sentence does {w} occur?",
    "sentence with {w}", "Which sentence has {w} in it?", "What is the sentence that {w} stands in?",
)  # fmt: skip
FOLLOWS = (
    *made(('what follows the words "{w}"', 'the rest of the sentence after "{w}"',
           'all that comes behind "{w}" in its sentence'), WAYS_OF_ONE, 12, VERBS),
    'What follows the words "{w}"?', 'How does the sentence go on after "{w}"?', '"{w} ..." How does it go on?',
    'What comes after "{w}" in the sentence?', 'Which words follow "{w}" up to the end of the sentence?',
    'With which words does the sentence continue behind "{w}"?',
)  # fmt: skip
NEXT = (
    *made(('the sentence after the one that begins with "{w}"', 'the sentence that follows the one starting "{w} ..."',
           'the next sentence after the one that opens with "{w}"'), WAYS_OF_ONE, 10, VERBS),
    'Which sentence comes after the one that begins with "{w}"?',
    'What is the sentence that follows the one beginning with "{w}"?',
    'What sentence stands behind the one that starts with "{w}"?',
)  # fmt: skip
LAST = (
    *made(("the last sentence of {p}", "the sentence that {p} ends with", "the closing sentence of {p}"),
          WAYS_OF_ONE, 10, VERBS),
    "What is the last sentence of {p}?", "With which sentence does {p} end?", "Which sentence stands last in {p}?",
)  # fmt: skip
WHOLE = (
    *made(("{p}", "the whole of {p}", "all that stands in {p}"), WAYS_OF_ONE, 12, VERBS),
    "What does {p} say, word for word?", "What is the full text of {p}?", "How does {p} read in full?",
)  # fmt: skip
ABOUT = (
    "the passage about {x}", "the text about {x}", "the passage on {x}", "the passage that is about {x}",
    "the passage that tells of {x}",
)  # fmt: skip
WHOLE_SENTENCE = re.compile(r"[\"“(]?[A-Z0-9].*[.!?][\"”)]?")
TELLING = re.compile(rf"(?<=[a-z,(] )(?:\d[\d,.]*\d\b|{NAME})")


@dataclass(frozen=True)
class Shown:
    """The passages of a context and its split; ``text`` is all of them, in small letters."""

    passages: Sequence[Passage]
    split: Split
    r: Random

    @cached_property
    def text(self) -> str:
        """All that is shown, to count words in."""
        return "\n\n".join(p.text for p in self.passages).lower()

    def is_once(self, words: str) -> bool:
        """Whether the words, in any letters, stand in one place of all that is shown."""
        return self.text.count(words.lower()) == 1

    def wording(self, templates: Sequence[str]) -> str:
        """A wording that the split may use."""
        return self.r.choice(of_split(templates, self.split))

    def passage(self) -> int:
        """The place of a passage; real ones three times as often."""
        return self.r.choices(range(len(self.passages)), [1 if p.facts else 3 for p in self.passages])[0]


def sentences(passage: Passage) -> tuple[str, ...]:
    """The sentences of a passage from its first one on, what stands at its head left out; and lines that are none."""
    return parts(passage.text[max(0, passage.text.find(passage.first)) :])


def is_fit(span: str) -> bool:
    """Whether a span is of the length that is asked for, and a whole sentence, its quotes and brackets closed."""
    is_closed = span.count('"') % 2 == 0 and span.count("(") == span.count(")")
    return LENGTHS[0] <= len(span) <= LENGTHS[1] and is_closed and WHOLE_SENTENCE.fullmatch(span) is not None


def drawn(shown: Shown, fit: Callable[[str], bool] = is_fit) -> str | None:
    """A sentence of some passage that is shown once, long ones more often."""
    found = [s for s in sentences(shown.passages[shown.passage()]) if fit(s)]
    chosen = shown.r.choices(found, [len(s) for s in found])[0] if found else None
    return chosen if chosen and shown.is_once(chosen) else None


def beginning(shown: Shown, sentence: str) -> str | None:
    """As many first words of a sentence as stand in one place; nothing where that takes too many, or one is quoted."""
    words = sentence.split(" ")
    for number in range(shown.r.choice(NUM_WORDS), min(MOST_WORDS, len(words) - REST) + 1):
        found = " ".join(words[:number]).rstrip(",;:")
        if shown.is_once(found):
            return None if '"' in found else found
    return None


def begins(shown: Shown) -> Ask | None:
    """The sentence that begins so."""
    sentence = drawn(shown)
    words = beginning(shown, sentence) if sentence else None
    return asked(shown, BEGINS, words, sentence)


def mentions(shown: Shown) -> Ask | None:
    """The sentence that has a name or number in it."""
    sentence = drawn(shown)
    found = [m.group() for m in TELLING.finditer(sentence or "") if len(m.group()) > 2 and shown.is_once(m.group())]
    return asked(shown, MENTIONS, shown.r.choice(found) if found else None, sentence)


def follows(shown: Shown) -> Ask | None:
    """The rest of a sentence behind some of its words."""
    sentence = drawn(shown) or ""
    words = sentence.split(" ")
    if len(words) < 2 * REST:
        return None
    place = shown.r.randint(0, len(words) - 2 * REST)
    found = beginning(shown, " ".join(words[place:]))
    return asked(shown, FOLLOWS, found, sentence[sentence.find(found) + len(found) :].lstrip(" ,;:") if found else None)


def after(shown: Shown) -> Ask | None:
    """The sentence behind the one that begins so, in one passage."""
    pairs = list(pairwise(sentences(shown.passages[shown.passage()])))
    found = [(one, other) for one, other in pairs if is_fit(other) and WHOLE_SENTENCE.fullmatch(one)]
    one, other = shown.r.choice(found) if found else ("", None)
    return asked(shown, NEXT, beginning(shown, one) if one else None, other)


def asked(shown: Shown, templates: Sequence[str], words: str | None, answer: str | None) -> Ask | None:
    """The question with the words in it, where there are such and the answer is long enough."""
    if not words or not answer or not LENGTHS[0] <= len(answer) <= LENGTHS[1]:
        return None
    return Ask(KIND, shown.wording(templates).replace("{w}", words), answer, starts=(0,))


def pointed_at(shown: Shown) -> tuple[str, Passage] | None:
    """Words that point at a passage, by what it is about or by where it stands; nothing where they might not do."""
    if shown.r.random() < 0.4:
        found = order.pointed_at(shown.passages, shown.split, shown.r)
        return None if found is None else (found[0], shown.passages[found[1]])
    passage = shown.passages[shown.passage()]
    about = about_of(passage)
    bare = about.removeprefix("the ").lower()
    named_in = [p for p in shown.passages if bare in p.text.lower()]
    if len(bare) < 3 or len(named_in) != 1 or named_in[0] is not passage:
        return None
    return shown.wording(ABOUT).replace("{x}", about), passage


def about_of(passage: Passage) -> str:
    """What a passage is about, as a question calls it; nothing where that is not one thing."""
    things = {named(f) for f in passage.facts if f.kind not in UNINVENTED}
    return passage.about or (things.pop() if len(things) == 1 and passage.facts else "")


def first(shown: Shown) -> Ask | None:
    """The first sentence of a passage, without what stands at its head."""
    return _of_passage(shown, order.SENTENCE, lambda p: p.first)


def last(shown: Shown) -> Ask | None:
    """The last sentence of a passage."""
    return _of_passage(shown, LAST, lambda p: next((s for s in sentences(p)[-1:] if is_fit(s)), ""))


def whole(shown: Shown) -> Ask | None:
    """A passage, where it is short."""
    return _of_passage(shown, WHOLE, lambda p: p.text)


def _of_passage(shown: Shown, templates: Sequence[str], part: Callable[[Passage], str]) -> Ask | None:
    found = pointed_at(shown)
    answer = part(found[1]) if found else ""
    if found is None or not LENGTHS[0] <= len(answer) <= LENGTHS[1]:
        return None
    return Ask(KIND, shown.wording(templates).replace("{p}", found[0]), answer, starts=(0,))


MAKERS: Mapping[Callable[[Shown], Ask | None], float] = {
    begins: 3.0, mentions: 2.5, follows: 2.0, after: 1.5, first: 1.5, last: 1.5, whole: 1.5,
}  # fmt: skip


def asks_of(passages: Sequence[Passage], split: Split, r: Random, number: int) -> list[Ask]:
    """At most ``number`` questions that a span of the passages answers, which are all that is shown; none twice."""
    shown = Shown(passages, split, r)
    found = [next(_made(shown), None) for _ in range(number)]
    return list({ask.answer: ask for ask in found if ask is not None}.values())


def _made(shown: Shown) -> Iterator[Ask]:
    for maker in shown.r.choices(list(MAKERS), list(MAKERS.values()), k=TRIES):
        ask = maker(shown)
        if ask is not None:
            yield ask
