"""Marks by hand-worked examples, and intervals."""

from __future__ import annotations

import json

import pytest

from hypic_apps.eval import calls, grading
from hypic_apps.eval.items import Form, Item
from hypic_apps.eval.statistics import Interval, estimate, gap, mean_of
from hypic_apps.train.world import NOT_STATED


def item(answer: str, form: Form = "short") -> Item:
    return Item("T", 0, (), "?", (answer,), (), form)


def test_normalising_is_squads() -> None:
    assert grading.normal("  The Torl, a river!") == "torl river"


@pytest.mark.parametrize(
    ("text", "answer", "exact", "f1"),
    [("The Torl.", "torl", 1, 1.0), ("the river Torl", "Torl", 0, 2 / 3), ("Ira", "Torl", 0, 0.0), ("", "Torl", 0, 0)],
)
def test_short_answers(text: str, answer: str, exact: int, f1: float) -> None:
    marks = grading.marks(item(answer), text)
    assert marks["exact_match"] == (exact, 1) and marks["f1"][0] == pytest.approx(f1)


def test_any_right_answer_counts() -> None:
    several = Item("T", 0, (), "?", ("May 18, 2018", "2018"))
    assert grading.marks(several, "2018")["exact_match"][0] == 1


def test_only_the_last_line_of_a_reasoned_answer_counts() -> None:
    text = "The capital of X is Ostham. The river of Ostham is the Torl.\nAnswer: the Torl"
    assert grading.marks(item("the Torl", "reasoned"), text)["exact_match"] == (1, 1)
    assert grading.marks(item("the Torl", "reasoned"), text.replace("Answer: the Torl", ""))["exact_match"] == (0, 1)


def test_rouge_l_by_hand() -> None:
    # the longest common subsequence of "a b c d" and "a c e d b" is "a c d": 2 * 3 / (4 + 5)
    assert grading.rouge_l("a b c d", "a c e d b") == pytest.approx(6 / 9)
    assert grading.rouge_l("a b", "a b") == 1.0 and grading.rouge_l("", "a") == 0.0


def test_facts_are_counted_one_by_one() -> None:
    answer = "(1) Velwick lies on the Torl (2) Osthal has 12 people. (3) The Ira is long"
    assert grading.fact_recall(
        "(1) Velwick lies on the Torl (2) Osthal has 13 people. (3) the Ira is long", answer
    ) == (2, 3)


def test_refusals() -> None:
    refused = grading.marks(item(NOT_STATED, "refusal"), "Not stated.")
    assert refused["refusal_precision"] == refused["refusal_recall"] == (1, 1)
    wrongly = grading.marks(item("Torl", "refusal"), "not stated")
    assert wrongly["refusal_precision"] == (0, 1) and wrongly["refusal_recall"] == (0, 0)
    told = grading.marks(item(NOT_STATED, "refusal"), "Torl")
    assert told["refusal_precision"] == (0, 0) and told["refusal_recall"] == (0, 1)


ANSWER = json.dumps(
    {"name": "book_room", "arguments": {"day": "Monday", "room": "Room 3.14", "minutes": "45"}, "rule": "minutes"}
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "book_room", "arguments": {"day": "monday", "room": "Room 3.14", "minutes": 45}}', (1, 1, 1)),
        ('Sure: {"name": "book_room", "arguments": {"day": "Monday", "room": "Room 3.14", "minutes": 60}}', (1, 1, 0)),
        ('{"name": "book_room", "arguments": {"day": "Friday", "minutes": "45"}}', (1, 0, 1)),
        ('{"name": "send_message", "arguments": {"day": "Monday"}}', (0, 0, 0)),
        ('{"name": "book_room", "arguments": "none"}', (1, 0, 0)),
        ("I booked it {for you}.", (0, 0, 0)),
    ],
)
def test_calls(text: str, expected: tuple[int, int, int]) -> None:
    assert tuple(calls.marks(text, ANSWER).values()) == expected
    assert grading.marks(item(ANSWER, "call"), text)["tool"] == (expected[0], 1)


def test_shares_have_wilsons_interval() -> None:
    found = estimate([(1.0, 1.0)] * 8 + [(0.0, 1.0)] * 2, is_share=True)
    assert found is not None
    assert (found.value, found.low, found.high) == (
        0.8,
        pytest.approx(0.4902, abs=1e-3),
        pytest.approx(0.9433, abs=1e-3),
    )
    assert estimate([(0.0, 0.0)], is_share=True) is None


def test_means_are_resampled() -> None:
    values = [(x / 100, 1.0) for x in range(101)]
    found = estimate(values, is_share=False)
    # the standard error of the mean of 0, 0.01 ... 1 is 0.2915 / sqrt(101) = 0.029
    assert found is not None and found.value == pytest.approx(0.5)
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.029, rel=0.1)


def test_gaps_are_paired() -> None:
    before = [(float(n % 2), 1.0) for n in range(100)]
    same = gap(before, before)
    # nothing differs among a hundred: Wilson's interval of 0 in 100 ends at 3.7 %
    assert (
        same is not None and (same.value, same.high) == (0, pytest.approx(0.037, abs=1e-3)) and same.low == -same.high
    )
    after = [(0.0, 1.0)] * 10 + before[10:]
    worse = gap(after, before)
    # five items of a hundred differ: sqrt(0.05 * 0.95 / 100) = 0.022, where unpaired it would be 0.07
    assert worse is not None and worse.value == pytest.approx(-0.05)
    assert worse.high - worse.low == pytest.approx(2 * 1.96 * 0.022, rel=0.2)


def test_means_of_independent_gaps() -> None:
    both = mean_of([Interval(-0.04, -0.07, -0.02), Interval(0.0, -0.04, 0.0)])
    assert (both.value, both.low, both.high) == (pytest.approx(-0.02), pytest.approx(-0.045), pytest.approx(-0.01))
