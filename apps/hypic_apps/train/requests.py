"""Requests for lists, made of parts: a verb, what is wanted, how it shall be set out, some politeness. And such lists.

The last wording of each kind is kept for measuring. Its verb occurs in others, its sentence and its object in none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

from hypic_apps.train.schema import Split

VERBS = (
    "List", "Give", "Copy", "Quote", "Repeat", "Note", "Note down", "Write out", "Put down", "Set down", "State",
    "Jot down", "Read out", "Collect", "Gather", "Show me", "Tell me", "Give me", "Recite", "Reproduce", "Extract",
    "Pick out", "Type out", "Enumerate", "Present", "Bring together", "Take down", "Return", "Print", "Write down",
    "Name", "Cite", "Write up", "Spell out",
)  # fmt: skip
LEADS = (
    "{}", "{}", "{}", "Please {}", "{}", "Could you {}", "{}", "I would like you to {}", "Now {}", "{}", "Can you {}",
    "{}", "Would you {}", "Kindly {}", "{}", "Your task is to {}", "You are asked to {}", "Next, {}",
    "I want you to {}",
)  # fmt: skip
WAYS = (
    "", ", in order", "", ", one after the other", "", ", in the order given", "", ", from the first to the last",
    "", " word for word", "", ", without comment", "", ", and nothing else", "", " exactly as written", "",
    ", each in turn", "", ", without leaving any out",
)  # fmt: skip
WAYS_OF_ONE = ("", " word for word", "", ", and nothing else", "", ", without comment", "", " exactly as written")
OF_EACH = (
    "the first sentence of each passage", "the opening sentence of every passage", "each passage's first sentence",
    "the first sentences of all passages", "the sentence that each passage begins with",
    "the first sentence of every text", "every passage's opening sentence", "the first sentences of the passages",
    "the first sentence from each of the passages", "the beginning sentence of each passage",
    "the first sentence of each document", "the opening sentences of all the passages",
    "for each passage its first sentence", "the sentence at the head of every passage",
    "the first sentence of all of the passages", "the first line or sentence of each passage",
)  # fmt: skip
ABOUT = (
    "all facts about {s}", "everything about {s}", "all that the passages say about {s}", "every fact about {s}",
    "everything that is said about {s}", "all sentences about {s}", "all that is told about {s}",
    "what is said about {s}", "whatever is said about {s}", "every statement about {s}", "all that is known of {s}",
    "all that is said of {s}", "all you can find about {s}", "each fact that is given about {s}",
    "what the passages tell of {s}", "all the information on {s}", "the facts on {s}", "all there is about {s}",
    "every sentence that is about {s}", "all that stands here about {s}", "what you have read about {s}",
    "everything there is to read on {s}", "all that was written about {s}",
)  # fmt: skip
LISTS_ASKED = (
    "What is the first sentence of each passage?", "What are the first sentences of the passages?",
    "With which sentences do the passages begin?", "Which sentence opens each of the passages?",
    "What is each passage's first sentence?", "How do the passages begin? Quote the first sentence of each.",
    "What sentence does each passage begin with, in order?", "What are the opening sentences, one after the other?",
    "Which are the first sentences of all the passages, from the first to the last?",
    "first sentence of each passage", "opening sentences of all passages", "The first sentences, please.",
)  # fmt: skip
FACTS_ASKED = (
    "What do the passages say about {s}?", "What is said about {s}?", "What are all the facts about {s}?",
    "What do we learn about {s}?", "Which facts are given about {s}?", "What can be read about {s}?",
    "What is there to know about {s}?", "What does the text tell us of {s}?", "What do you know about {s}?",
    "Which sentences are about {s}?", "What is written here about {s}?", "What all is told of {s}?",
    "{s}: all facts", "all about {s}", "All that there is on {s}, please.", "What have you read about {s}?",
)  # fmt: skip
NUM_MADE = 120
STEP = 7  # takes every seventh pair of verb and object, then those beside them


def bare(text: str) -> str:
    """A wording without case, punctuation and spacing."""
    return " ".join(re.findall(r"[a-z0-9{}']+", text.lower()))


def made(
    wanted: Sequence[str], ways: Sequence[str] = WAYS, number: int = NUM_MADE, verbs: Sequence[str] = VERBS
) -> Iterator[str]:
    """``number`` requests for what is ``wanted``: pairs of verb and object, all of them in use, each with a lead and a
    way to set it out."""
    pairs = list(product(wanted, verbs))
    chosen = [pair for start in range(STEP) for pair in pairs[start::STEP]][:number]
    for place, (what, verb) in enumerate(chosen):
        lead, way = LEADS[place % len(LEADS)], ways[place % len(ways)]
        verb = verb if lead == "{}" else verb[:1].lower() + verb[1:]
        yield lead.format(verb) + f" {what}{way}" + ("?" if lead.startswith(("Could", "Can", "Would")) else ".")


def _kept_apart(wordings: Sequence[str], held_out: str) -> tuple[str, ...]:
    """The wordings, none of them twice and none with the one in it that is held out; that one is the last."""
    found = {bare(text): text for text in reversed(wordings) if bare(held_out) not in bare(text)}
    return (*reversed(found.values()), held_out)


LISTS = _kept_apart(
    ["List the first sentence of each passage.", *LISTS_ASKED, *made(OF_EACH)],
    "Write down the first sentence of every passage.",
)
FACTS = _kept_apart(["List all facts about {s}.", *FACTS_ASKED, *made(ABOUT)], "Write down all that is said about {s}.")


def of_split(wordings: Sequence[str], split: Split) -> Sequence[str]:
    """The wordings that a split may use: ``test`` has the last alone."""
    return wordings[-1:] if split == "test" else wordings[:-1]


def strung(items: Sequence[str], marks: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """The items one after the other, each behind its mark, and where each begins behind that."""
    text, starts = "", []
    for item, mark in zip(items, marks, strict=True):
        text += (" " if text else "") + mark
        starts.append(len(text))
        text += item
    return text, tuple(starts)


def numbered(items: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """The items as "(1) ... (2) ...", and the places at which they begin."""
    return strung(items, [f"({i}) " for i in range(1, len(items) + 1)])
