"""Contract 5: continuing equals starting again: snapshots, heads, prefill and encoding in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hypic.engine import scheduler
from hypic.engine.admission import Admission
from hypic.engine.plan import Piece
from hypic.engine.request import Request
from hypic.engine.snapshots import Snapshots
from hypic.types import Policy
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, flat, live, seg

Make = Callable[..., Bench]
DTYPES = list(TOLERANCE)
MODELS = ["qwen", "minimax", "minimax-partial"]
WIDE = [("qwen", "float64"), ("qwen", "float32"), ("minimax", "float64"), ("minimax-partial", "float64")]
STEPS = [1, 2, 3, 63, 64, 65]


# -- in pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_pieces_equals_one_pass(
    name: str, num_tokens: int, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    for dtype in DTYPES if num_tokens in (2, 64) else ["float64"]:
        engine = bench(name, dtype, max_step_tokens=num_tokens)
        cold = engine.ask(few_segments(), max_tokens=3)
        warm = engine.ask(few_segments(), max_tokens=3)
        expected = checkpoints.expected(name, few_segments(), generated=cold.ids[:-1])
        assert max(cold.runs) <= num_tokens and len(warm.runs) >= len(warm.logits) // num_tokens
        assert cold.error_to(expected) < TOLERANCE[dtype]
        assert warm.error_to(expected) < TOLERANCE[dtype]
        engine.assert_back_to_start()


@pytest.mark.parametrize("num_tokens", [7, 65])
def test_live_prompts_in_pieces_equal_one_pass(
    num_tokens: int, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    for name in MODELS:
        answer = bench(name, max_step_tokens=num_tokens).ask([live(150, 1)])
        assert answer.error_to(checkpoints.expected(name, [live(150, 1)])) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_pieces_bite(name: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece starts from nothing, as the first did."""
    sound = Request._chain

    def faulty(self: Request, *args, **options):  # type: ignore[no-untyped-def]
        chain = sound(self, *args, **options)
        object.__setattr__(chain, "initial_slot", 0)
        return chain

    monkeypatch.setattr(Request, "_chain", faulty)
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    for dtype in DTYPES:
        answer = bench(name, dtype, max_step_tokens=20).ask(few_segments())
        assert answer.error_to(checkpoints.expected(name, few_segments())) > 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoding_in_pieces_feeds_the_same_answer(
    dtype: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    pieces = [live(5, 1), seg(150, 2), seg(9, 3), seg(70, 4), live(9, 5)]
    for name in ("qwen", "minimax"):
        for num_tokens in (4, 9) if dtype == "float64" else (8,):
            answer = bench(name, dtype, max_step_tokens=num_tokens).ask(pieces)
            assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE[dtype]


# -- snapshots -------------------------------------------------------------------------------------------------------


def conversation(engine: Bench, name: str, checkpoints: Checkpoints, dtype: str, num_turns: int = 4) -> list[Answer]:
    """Turns that each repeat all before them, the answers included, and are compared from scratch."""
    pieces, answers = [live(40, 1, ends=True), seg(30, 2), live(4, 3), seg(20, 4), live(9, 5, ends=True)], []
    for turn in range(num_turns):
        answer = engine.ask([*pieces, live(3, 50 + turn)], max_tokens=4)
        prompt = [*pieces, live(3, 50 + turn)]
        expected = checkpoints.expected(name, prompt, generated=answer.ids[:-1])
        assert answer.error_where_run(expected) < TOLERANCE[dtype]
        answers.append(answer)
        said = type(live(1, 1))(tuple(answer.ids), None, True)
        pieces = [*prompt, said, live(35, 60 + turn, ends=True)]
        if turn == 1:
            pieces += [seg(25, 7), live(3, 8, ends=True)]
    return answers


@pytest.mark.parametrize(("name", "dtype"), WIDE)
def test_a_conversation_from_snapshots_equals_from_scratch(
    name: str, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    engine = bench(name, dtype)
    answers = conversation(engine, name, checkpoints, dtype)
    assert all(answer.report.computed_tokens < 85 for answer in answers[1:])
    assert all(min(answer.logits) > 40 for answer in answers[1:]), "each turn continues behind the one before"
    assert answers[2].outcomes == ["hit", "hit", "encoded"] and answers[3].outcomes == ["hit"] * 3
    engine.assert_back_to_start()


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_without_segments_a_conversation_equals_full_recompute(
    name: str, bench: Make, checkpoints: Checkpoints
) -> None:
    engine, pieces = bench(name), [live(40, 1, ends=True)]
    for turn in range(3):
        pieces = [*pieces, live(33, 10 + turn, ends=True), live(2, 20 + turn)]
        continued = engine.ask(pieces)
        scratch = bench(name).ask(pieces, Policy(reuse="none"))
        assert relative(continued.rows(), scratch.rows(sorted(continued.logits))) < TOLERANCE["float64"]
        assert len(scratch.logits) == len(flat(pieces)) > len(continued.logits) or turn == 0
        assert relative(scratch.rows(), checkpoints.reference(name).full(flat(pieces)).logits) < TOLERANCE["float64"]


def test_prefix_reuse_equals_full_recompute_whatever_the_segments(bench: Make, checkpoints: Checkpoints) -> None:
    policy = Policy(reuse="prefix")
    for name in ("qwen", "minimax"):
        engine = bench(name)
        shared = [live(40, 1), seg(30, 2), seg(41, 3)]
        for tail in (4, 5):
            pieces = [*shared, live(7, tail)]
            answer = engine.ask(pieces, policy)
            full = checkpoints.reference(name).full(flat(pieces)).logits
            assert relative(answer.rows(), full[sorted(answer.logits)]) < TOLERANCE["float64"]
        assert len(answer.logits) == 7 and answer.reasons == ["prefix reuse only"] * 2


SNAPSHOT_TURNS = [live(40, 1, ends=True), seg(30, 2), live(40, 3, ends=True)]


def snapshot_fault(fault: str, patch: pytest.MonkeyPatch) -> None:
    if fault == "wrong state":
        sound = Admission._hold

        def faulty(self: Admission, request: Request, *args: Any, **named: Any) -> None:
            sound(self, request, *args, **named)
            request.initial_slot = 0

        patch.setattr(Admission, "_hold", faulty)
        return
    made = Snapshots.settle

    def stored_one_late(self, taken, is_broken: bool) -> None:  # type: ignore[no-untyped-def]
        """The snapshot's keys are those of one token later."""
        made(self, taken, is_broken)
        for entry in self.admission.store:
            if entry.is_snapshot:
                entry.kv_slots[1:] = entry.kv_slots[:-1].copy()

    patch.setattr(Snapshots, "settle", stored_one_late)


@pytest.mark.parametrize("fault", ["wrong state", "wrong pages"])
@pytest.mark.parametrize("name", MODELS)
def test_snapshots_bite(
    name: str, fault: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_fault(fault, monkeypatch)
    for dtype in DTYPES:
        engine = bench(name, dtype)
        engine.ask([*SNAPSHOT_TURNS, live(2, 4)])
        pieces = [*SNAPSHOT_TURNS, live(5, 5)]
        answer = engine.ask(pieces)
        assert len(answer.logits) == 5
        assert answer.error_where_run(checkpoints.expected(name, pieces)) > 100 * TOLERANCE[dtype]


def test_a_snapshot_serves_only_what_it_was_taken_of(bench: Make, checkpoints: Checkpoints) -> None:
    """Another policy, another segment in the head, or the same tokens as live text: none continues from it."""
    engine = bench("qwen")
    engine.ask([*SNAPSHOT_TURNS, live(2, 4)])
    head, document, turn = SNAPSHOT_TURNS
    others = [
        ([head, seg(30, 9), turn, live(5, 5)], POLICY, 40),
        ([head, type(head)(document.ids), turn, live(5, 5)], POLICY, 40),
        ([*SNAPSHOT_TURNS, live(5, 5)], Policy(min_segment_tokens=0, compose="last"), 0),
        ([*SNAPSHOT_TURNS, live(5, 5)], Policy(min_segment_tokens=0, rotate=False), 0),
        ([*SNAPSHOT_TURNS, live(5, 5)], Policy(reuse="none"), 0),
        ([*SNAPSHOT_TURNS, live(5, 5)], Policy(seam=16, min_segment_tokens=0), 40),
        ([*SNAPSHOT_TURNS, live(5, 5)], POLICY, 110),
    ]
    for pieces, policy, first in others:
        answer = engine.ask(pieces, policy)
        assert min(answer.logits) == first
        assert answer.error_where_run(checkpoints.expected("qwen", pieces, policy)) < TOLERANCE["float64"]


def test_borders_inside_live_text_do_not_enter_a_snapshots_key(bench: Make) -> None:
    engine, whole = bench("qwen"), live(60, 1)
    engine.ask([type(whole)(whole.ids, None, True), live(3, 2)])
    parts = [type(whole)(whole.ids[:25]), type(whole)(whole.ids[25:60], None, True)]
    assert min(engine.ask([*parts, live(4, 3)]).logits) == 60


# -- heads -----------------------------------------------------------------------------------------------------------


def with_head(engine: Bench, checkpoints: Checkpoints, name: str) -> float:
    """A turn that comes back in another form than it was generated in, continued from a head: its error."""
    first = [live(40, 1, ends=True), seg(30, 2), live(9, 3, ends=True)]
    said = engine.ask([*first, live(3, 50)], max_tokens=4).ids
    head = [*first, live(5, 51), Piece(tuple(said), None, True, is_answer=True)]
    engine.head(head)
    pieces = [*head, live(6, 52)]
    answer = engine.ask(pieces)
    assert sorted(answer.logits) == list(range(len(flat(head)), len(flat(pieces)))), "the next turn ran its new text"
    return answer.error_where_run(checkpoints.expected(name, pieces))


@pytest.mark.parametrize(("name", "dtype"), WIDE)
def test_a_head_is_continued_as_from_scratch(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench(name, dtype)
    assert with_head(engine, checkpoints, name) < TOLERANCE[dtype]
    engine.assert_back_to_start()


@pytest.mark.parametrize("fault", ["wrong state", "wrong pages"])
def test_heads_bite(fault: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench("qwen", "float64")
    if fault == "wrong state":
        snapshot_fault(fault, monkeypatch)
    else:
        taken = Admission.snapshot

        def moved(self: Admission, *args, **options):  # type: ignore[no-untyped-def]
            entry = taken(self, *args, **options)
            entry.kv_slots[1:] = entry.kv_slots[:-1].copy()
            return entry

        monkeypatch.setattr(Admission, "snapshot", moved)
    assert with_head(engine, checkpoints, "qwen") > 100 * TOLERANCE["float64"]


def test_a_head_that_would_cost_more_than_it_saves_is_not_begun(bench: Make) -> None:
    engine = bench("qwen")
    engine.head([live(400, 1, ends=True), seg(30, 2), live(9, 3, ends=True), live(30, 4, ends=True)])
    assert engine.num_segments == 0 and list(engine.store) == []
    engine.assert_back_to_start()
