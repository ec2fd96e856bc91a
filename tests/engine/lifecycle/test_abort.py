"""Requests that are called off, at every stage from waiting to decoding: others go on, and all memory comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import few_segments, live, seg

Make = Callable[..., Bench]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5, 6, 7, 8, 9, 10, 16])
def test_abort_at_every_stage(num_steps: int, bench: Make, checkpoints: Checkpoints) -> None:
    """With sixteen tokens a step: five encode, four prefill, nine decode."""
    for name in ("qwen", "minimax"):
        engine = bench(name, max_step_tokens=16)
        doomed = engine.add([live(20, 1, ends=True), seg(40, 2), seg(40, 3), live(30, 4)], max_tokens=9)
        for _ in range(num_steps):
            engine.step()
        beside = engine.add([live(20, 1, ends=True), seg(40, 3), live(9, 5)], max_tokens=3)
        engine.step()
        engine.abort(doomed)
        engine.assert_sound()
        engine.abort(doomed)
        engine.run()
        pieces = [live(20, 1, ends=True), seg(40, 3), live(9, 5)]
        expected = checkpoints.expected(name, pieces, generated=beside.ids[:-1])
        assert beside.error_where_run(expected) < TOLERANCE["float64"]
        assert all(not piece.report for piece in doomed.pieces), "nothing comes after an abort"
        engine.assert_back_to_start()


def test_abort_goes_through_every_stage(bench: Make) -> None:
    """What the numbers of steps above are chosen for."""
    engine, stages = bench("qwen", max_step_tokens=16), []
    answer = engine.add([live(20, 1, ends=True), seg(40, 2), seg(40, 3), live(30, 4)], max_tokens=9)
    (request,) = engine.engine.scheduler.waiting
    while engine.engine.has_work:
        engine.step()
        kind = "decode" if request.is_decoding else "prefill" if request.done else "encode"
        stages.append(kind)
    assert stages == ["encode"] * 5 + ["prefill"] * 4 + ["decode"] * 9
    assert len(answer.ids) == 9


def test_abort_while_waiting_holds_up_nobody(bench: Make) -> None:
    engine = bench("qwen", max_running=1)
    answers = [engine.add(few_segments(), max_tokens=4) for _ in range(3)]
    engine.step()
    assert len(engine.engine.scheduler.waiting) == 2
    engine.abort(answers[1])
    engine.run()
    assert [len(answer.ids) for answer in answers] == [4, 0, 4]
    engine.assert_back_to_start()


def test_an_encode_goes_on_while_anyone_waits_for_it(bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=16)
    first, second, third = [engine.add([seg(60, 1), live(3, 10 + i)]) for i in range(3)]
    engine.step()
    engine.abort(first)
    engine.step()
    engine.abort(third)
    assert len(engine.engine.admission.encoding) == 1
    engine.run()
    assert second.outcomes == ["hit"] or second.outcomes == ["encoded"]
    assert engine.num_segments == 1
    again = engine.add([seg(61, 2), live(3, 10)])
    engine.step()
    engine.abort(again)
    assert not engine.engine.admission.encoding and engine.num_segments == 1
    engine.assert_back_to_start()


def test_abort_of_an_unknown_or_finished_request_does_nothing(bench: Make) -> None:
    engine = bench("qwen")
    answer = engine.ask(few_segments())
    engine.engine.abort("never heard of")
    engine.abort(answer)
    engine.assert_back_to_start()
