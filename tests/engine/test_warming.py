"""Segments that are only encoded, for later or for another worker: together, and whatever else runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hypic.engine.plan import Piece
from hypic.engine.task import Task
from hypic.types import SamplingParams
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg

Make = Callable[..., Bench]


def encodes(engine: Bench) -> list[int]:
    """How many segments each step encodes from now on."""
    found, launch = list[int](), engine.engine.scheduler.schedule

    def schedule() -> object:
        work = launch()
        found.append(0 if work is None else len(work.encodes))
        return work

    engine.engine.scheduler.schedule = schedule  # type: ignore[assignment]
    return found


def asked(engine: Bench, numbers: Sequence[int], stays: bool = False) -> list[Answer]:
    """Segments to be warmed, at once; for another worker if they are to stay."""
    answers = []
    for number in numbers:
        id, answer = f"warm{number}", Answer()
        task = Task(id, [seg(20, number), Piece((0,))], SamplingParams(), POLICY, warm=True, stays=stays)
        engine.answers[id] = answer
        engine.engine.add(task)
        answers.append(answer)
    return answers


def test_what_is_asked_at_once_is_encoded_together(bench: Make) -> None:
    """However few requests may run: they hold no state."""
    engine = bench("qwen", max_running=1)
    steps, answers = encodes(engine), asked(engine, range(6))
    engine.step()
    assert steps == [6]
    engine.run()
    assert all(answer.is_over and answer.error is None for answer in answers) and engine.num_segments == 6
    engine.assert_back_to_start()


def test_answers_are_still_so_few_at_a_time(bench: Make) -> None:
    """The control: what takes a state counts."""
    engine = bench("qwen", max_running=2)
    for number in range(4):
        engine.add([seg(20, number), live(4, 50 + number)], max_tokens=3)
    asked(engine, range(10, 14))
    most = 0
    while engine.engine.has_work:
        engine.step()
        running = engine.engine.scheduler.running.values()
        most = max(most, sum(not request.only_warms for request in running))
    assert most == 2
    engine.assert_back_to_start()


def test_what_another_worker_waits_for_does_not_wait_for_answers(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", max_running=1)
    first = engine.add([live(9, 1)], max_tokens=12)
    second = engine.add([live(7, 2)], max_tokens=12)
    engine.step()
    steps, answers = encodes(engine), asked(engine, range(3), stays=True)
    engine.step()
    assert steps == [3] and not first.is_over
    engine.step()
    assert all(answer.is_over for answer in answers) and not second.ids
    engine.run()
    for answer, pieces in ((first, [live(9, 1)]), (second, [live(7, 2)])):
        expected = checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])
        assert answer.error_where_run(expected) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_what_is_warmed_for_later_waits_its_turn(bench: Make) -> None:
    """Only what somebody waits for goes before requests that came before it; the rest goes where there is room."""
    engine = bench("qwen", max_running=2)
    before = [engine.add([live(9, number)], max_tokens=2) for number in range(2)]
    asked(engine, [1], stays=False)
    asked(engine, [2], stays=True)
    engine.engine.scheduler._admit()
    running = list(engine.engine.scheduler.running)
    assert running == ["warm2", *(engine.id_of(answer) for answer in before), "warm1"]
    engine.run()
    engine.assert_back_to_start()


def test_no_more_is_begun_than_a_step_holds(bench: Make) -> None:
    """Or what is warmed for later would take all memory from whoever comes next."""
    engine = bench("qwen", max_step_tokens=50, max_running=1)
    steps, answers = encodes(engine), asked(engine, range(10))
    most = 0
    while engine.engine.has_work:
        engine.step()
        most = max(most, len(engine.engine.admission.encoding))
    assert most <= 3 and steps[0] == 3 and sum(steps) >= 10 and all(answer.is_over for answer in answers)
    engine.assert_back_to_start()


def test_who_asked_first_runs_while_others_segments_wait_for_room(bench: Make) -> None:
    """What another worker asks for fills steps; it does not keep this worker's own requests from beginning."""
    engine = bench("qwen", max_step_tokens=32)
    asked(engine, range(10), stays=True)
    answer = engine.add([live(9, 1)], max_tokens=2)
    engine.step()
    assert engine.id_of(answer) in engine.engine.scheduler.running
    engine.run()
    engine.assert_back_to_start()


def test_a_warmed_segment_holds_no_state(bench: Make) -> None:
    """Of the pool it takes what its entry takes, and what encoding it does."""
    engine = bench("qwen")
    before = engine.pool.free
    asked(engine, [1])
    engine.engine.scheduler.schedule()
    (request,) = engine.engine.scheduler.running.values()
    assert request.held is not None and request.held.state_slot == 0 and request.held.table_row is None
    (job,) = engine.engine.admission.encoding.values()
    need = engine.engine.admission.jobs.need(request.plan.interiors[0])
    assert before.states - engine.pool.free.states == need.states
    assert job.entry.state_slot and job.state_slot
    engine.run()
    engine.assert_back_to_start()


def test_an_answer_does_not_wait_for_all_that_is_warmed(bench: Make) -> None:
    """Steps are full of what is warmed, and rows have their part of each."""
    for stays in (False, True):
        engine = bench("qwen", max_step_tokens=80)
        asked(engine, range(3))
        answer = engine.add([live(60, 1)], max_tokens=2)
        asked(engine, range(10, 60), stays=stays)
        while not answer.pieces:
            engine.step()
        assert engine.num_steps <= 3 and engine.num_segments < 20
        engine.run()
        engine.assert_back_to_start()


def test_neither_queue_holds_up_the_other(bench: Make) -> None:
    """What is warmed for later waits for a step that has room; not for one without segments that others ask for."""
    engine = bench("qwen", max_step_tokens=80)
    others = asked(engine, range(40), stays=True)
    later = asked(engine, range(50, 53))
    answer = engine.add([live(9, 1)], max_tokens=1)
    for _ in range(4):
        engine.step()
    assert answer.is_over and all(one.is_over for one in later) and not all(one.is_over for one in others)
    engine.run()
    engine.assert_back_to_start()


def test_what_others_ask_for_keeps_nothing_from_being_read(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of who waits, the first few are looked ahead for; those that only warm need nothing."""
    engine, read = bench("qwen", max_running=1, max_step_tokens=16), list[str]()
    monkeypatch.setattr(type(engine.engine.admission.lookup), "prefetch", lambda self, request: read.append(request.id))
    asked(engine, range(8), stays=True)
    answers = [engine.add([live(9, number)], max_tokens=2) for number in range(2)]
    engine.step()
    assert read == [engine.id_of(answer) for answer in answers]
    engine.run()
