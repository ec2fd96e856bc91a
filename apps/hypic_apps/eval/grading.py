"""Answers against expected ones: exact match, F1, ROUGE-L, facts recalled, refusals, calls.

A mark is a pair (numerator, denominator) of one item; a metric is the sum of the ones over the sum of the others, so
that shares, means, precision and recall are one thing. Normalisation for exact match and F1 is SQuAD's (Rajpurkar et
al. 2016); ROUGE-L is the F-measure of the longest common subsequence of words (Lin 2004).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from hypic_apps.eval import calls
from hypic_apps.eval.items import Item
from hypic_apps.train.world import FINALLY, NOT_STATED

Mark = tuple[float, float]
PRIMARY = {
    "short": "exact_match",
    "reasoned": "exact_match",
    "long": "rouge_l",
    "refusal": "exact_match",
    "call": "tool",
}
# The metrics that show an item's quality; the others tell how like full recompute an answer is.
QUALITY = (
    *("exact_match", "f1", "rouge_l", "fact_recall", "refusal_precision", "refusal_recall"),
    *("tool", "arguments", "rule"),
)
# Metrics whose marks are numbers; all others count items.
MEANS = ("f1", "rouge_l", "fact_recall", "kl", "run_share", "encoded_share", "cached_bytes", "floor_s")


def marks(item: Item, text: str) -> dict[str, Mark]:
    """All marks of an answer."""
    if item.form == "call":
        return {name: (float(right), 1.0) for name, right in calls.marks(text, item.answers[0]).items()}
    if item.form == "long":
        return {"rouge_l": (rouge_l(text, item.answers[0]), 1.0), "fact_recall": fact_recall(text, item.answers[0])}
    said = final(text) if item.form == "reasoned" else text
    found = {"exact_match": (float(any(normal(said) == normal(a) for a in item.answers)), 1.0)}
    if item.form == "refusal":
        return {**found, **_refusal(said, item.answers[0])}
    return {**found, "f1": (max(f1(said, a) for a in item.answers), 1.0)}


def _refusal(text: str, answer: str) -> Mapping[str, Mark]:
    refused, unanswerable = normal(text) == NOT_STATED, answer == NOT_STATED
    both = float(refused and unanswerable)
    return {"refusal_precision": (both, float(refused)), "refusal_recall": (both, float(unanswerable))}


def final(text: str) -> str:
    """What stands behind the last ``Answer:``; the whole text if there is none."""
    return text.rpartition(FINALLY)[2].strip()


def normal(text: str) -> str:
    """Lower case, without punctuation, articles and doubled spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words; two empty texts agree."""
    said, expected = normal(text).split(), normal(answer).split()
    if not said or not expected:
        return float(said == expected)
    common = sum((Counter(said) & Counter(expected)).values())
    return 2 * common / (len(said) + len(expected))


def rouge_l(text: str, answer: str) -> float:
    """F-measure of the longest common subsequence of words."""
    said, expected = words(text), words(answer)
    if not said or not expected:
        return float(said == expected)
    return 2 * _common(said, expected) / (len(said) + len(expected))


def words(text: str) -> list[str]:
    """Words in lower case, as ROUGE cuts them."""
    return re.findall(r"\w+", text.lower())


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, theirs in enumerate(other, 1):
            kept = row[place]
            row[place] = before + 1 if word == theirs else max(row[place], row[place - 1])
            before = kept
    return row[-1]


def fact_recall(text: str, answer: str) -> Mark:
    """How many of the answer's sentences or numbered parts stand in the text, of how many."""
    parts = [" ".join(words(part)) for part in re.split(r"\(\d+\)|(?<=[.!?])\s", answer)]
    said = " ".join(words(re.sub(r"\(\d+\)", " ", text)))
    wanted = [part for part in parts if part]
    return float(sum(part in said for part in wanted)), float(len(wanted))
