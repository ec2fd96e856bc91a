"""Where sentences end: the first one of a text, and all of a text that spans are copied from.

Two lists of abbreviations, for two ends. ``first_sentence`` has the certain ones, by which the frozen set S3 was made:
what it takes for an end is graded. ``parts`` also has words that end a sentence as often as not ("Inc.", "etc."): a
span that goes on too far only is a longer copy, one that is cut off is a wrong one.
"""

from __future__ import annotations

import re

SENTENCE_END = re.compile(r"[.!?](?= [\"“(#]?[A-Z0-9])")
ABBREVIATED = re.compile(
    r"\b(?:[A-Z]|St|Dr|Mr|Mrs|Ms|Mt|Ft|Nos?|Gen|Col|Lt|Prof|Rev|Gov|Sen|Capt|ca?|cf|fl|lit|vs|e\.g|i\.e)\.$"
)
CLOSED = re.compile(r"(?<=[.!?])[ \t]+(?=[\"“(]?[A-Z0-9])|\n+")
OFTEN_ABBREVIATED = re.compile(
    r"(?:\b(?:[A-Za-z]|St|Sts|Jr|Sr|Mr|Mrs|Ms|Dr|Mt|Ft|No|Nos|Inc|Ltd|Co|Corp|Bros|vs|etc|ca|approx|transl|lit|Gen|Col|Capt|"
    r"Prof|Rev|Gov|Sen|Lt|Sgt|Vol|pp|ed|est|[a-z]\.[a-z]|[A-Z]\.[A-Z])\.|\.\.\.)$"
)


def first_sentence(text: str) -> str:
    """The text up to the end of its first sentence or line; initials and titles ("Hunter S.", "St.") end none."""
    line = next(part for part in text.split("\n") if part)
    end = next((m.end() for m in SENTENCE_END.finditer(line) if not ABBREVIATED.search(line[: m.end()])), None)
    return line[:end]


def parts(text: str) -> tuple[str, ...]:
    """The sentences of a text, and lines that are none."""
    out, start = [], 0
    for gap in CLOSED.finditer(text):
        if "\n" in gap.group() or not OFTEN_ABBREVIATED.search(text[start : gap.start()]):
            out.append(text[start : gap.start()].strip())
            start = gap.end()
    return tuple(part for part in (*out, text[start:].strip()) if part)
