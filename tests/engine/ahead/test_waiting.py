"""Who comes while decode steps are launched ahead, or waits for a place, waits for one step more at most."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from hypic.engine.loop import EngineLoop
from hypic.engine.read_back import ReadBack
from hypic.engine.scheduler import Scheduler
from hypic.engine.task import Emission, Task
from hypic.types import SamplingParams
from tests.engine.ahead.asking import AHEAD, Make, take_steps, told
from tests.engine.answer import Answer
from tests.engine.prompts import POLICY, few_segments, live, many_segments, seg


def test_who_comes_waits_for_one_step_at_most(make: Make) -> None:
    waited = {}
    for num in (0, AHEAD):
        engine = make("qwen", num)
        engine.add([live(20, 3)], max_tokens=40)
        take_steps(engine, 5)
        late, before = engine.add([live(30, 4)], max_tokens=3), engine.num_steps
        while not late.pieces:
            engine.step()
        waited[num] = engine.num_steps - before
    assert waited == {0: 1, AHEAD: 2}


def test_nothing_is_launched_before_those_who_have_come(make: Make, launches: list[int]) -> None:
    engine = make("qwen", AHEAD)
    engine.add([live(20, 3)], max_tokens=40)
    take_steps(engine, 5)
    late = list[Answer]()

    def take_in(read_back: ReadBack) -> None:
        if not late:
            late.append(engine.add([live(30, 4)], max_tokens=3))

    engine.engine.meanwhile = take_in
    before = len(launches)
    engine.step()
    assert len(launches) == before and not late[0].pieces
    engine.step()
    assert len(late[0].pieces) == 1 and launches[-1] == 2


TIGHT, LENGTHS = (24, 8, 4), (60, 61, 300, 301)  # pages of 16 tokens: room for two to grow, and for no third


@pytest.mark.parametrize(
    ("limits", "least", "most"), [({"max_running": 2}, 0.9, 1), ({"sizes": TIGHT}, 0.4, 0.6)], ids=["full", "tight"]
)
def test_steps_are_launched_while_others_wait_for_whom_there_is_no_place(
    limits: dict[str, Any], least: float, most: float, make: Make, launches: list[int]
) -> None:
    seen, num_ahead, num_waiting = list[Any](), 0, 0
    for num in (0, AHEAD):
        engine, num_waiting = make("qwen", num, **limits), 0
        answers = [engine.add([live(count, n)], max_tokens=24 + n) for n, count in enumerate(LENGTHS)]
        while engine.engine.has_work:
            before = len(launches)
            engine.step()
            engine.assert_sound()
            if len(engine.engine.scheduler.waiting) == 2:
                num_waiting, num_ahead = num_waiting + 1, num_ahead + len(launches) - before
        seen.append([told(answer) for answer in answers])
        engine.assert_back_to_start()
    assert seen[0] == seen[1] and num_waiting > 20
    assert least * num_waiting < num_ahead <= most * num_waiting


@pytest.mark.parametrize("limits", [{"max_running": 2}, {"sizes": TIGHT}], ids=["full", "tight"])
@pytest.mark.parametrize("by", ["length", "stop", "abort"])
def test_who_waits_for_a_place_waits_for_one_step_more_at_most(limits: dict[str, Any], by: str, make: Make) -> None:
    plain = make("qwen", 0).ask([live(60, 0)], max_tokens=40)
    place = next(n for n in range(8, 40) if plain.ids.index(plain.ids[n]) == n)
    stop = (chr(0x4E00 + plain.ids[place]),) if by == "stop" else ()
    begun = {}
    for num in (0, AHEAD):
        engine = make("qwen", num, **limits)
        first = engine.add([live(60, 0)], max_tokens=place if by == "length" else 40, stop=stop)
        engine.add([live(61, 1)], max_tokens=60)
        late = engine.add([live(300, 2)], max_tokens=3)
        while not late.pieces:
            if by == "abort" and engine.num_steps == place:
                engine.abort(first)
            engine.step()
        begun[num] = engine.num_steps
        assert place <= begun[num] < 40
    assert begun[AHEAD] - begun[0] <= (by != "length")


def test_what_who_waits_will_need_is_read_meanwhile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, read = make("qwen", AHEAD, max_running=1), list[str]()
    monkeypatch.setattr(type(engine.engine.admission.lookup), "prefetch", lambda self, request: read.append(request.id))
    engine.add([live(20, 3)], max_tokens=40)
    take_steps(engine, 5)
    assert engine.engine._ahead is not None
    late = engine.add([live(30, 4)], max_tokens=3)
    take_steps(engine, 2)
    assert read[-2:] == [engine.id_of(late)] * 2 and engine.engine._ahead is not None


def test_deterministic_requests_take_turns_as_before(make: Make, launches: list[int]) -> None:
    policy = POLICY.with_(deterministic=True)
    seen = []
    for num in (0, AHEAD):
        engine = make("qwen", num)
        answers = [engine.add(pieces, policy, max_tokens=9) for pieces in (few_segments(), [live(30, 2)])]
        answers.append(engine.add([live(14, 5)], max_tokens=5))
        engine.run()
        alone = engine.ask(many_segments(), policy, max_tokens=9)
        seen.append([told(answer) for answer in (*answers, alone)])
        engine.assert_back_to_start()
    assert seen[0] == seen[1] and launches and set(launches) == {1}


def test_what_is_called_finds_the_device_at_rest(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = make("qwen", AHEAD), list[str]()
    monkeypatch.setattr(engine.engine, "rest", lambda: seen.append("rest"))
    loop, heard = EngineLoop(engine.engine), queue.SimpleQueue[Emission]()
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    loop.submit(Task("one", few_segments(), sampling, POLICY), heard.put)
    loop.call(lambda engine: seen.append("call"))
    while not heard.get(timeout=30).is_last:
        pass
    loop.close()
    assert seen == ["rest", "call", "rest"], "and when the engine is closed"


def test_who_begins_nothing_may_change_running_requests(make: Make) -> None:
    """``Scheduler.running`` is what tells which requests of a step are left; one that came again is not the same."""
    engine = make("qwen", AHEAD)
    first = engine.add([live(20, 3)], max_tokens=40)
    take_steps(engine, 4)
    scheduler: Scheduler = engine.engine.scheduler
    request = scheduler.running[engine.id_of(first)]
    engine.abort(first)
    again = Task(request.id, [live(25, 8)], SamplingParams(max_tokens=4, ignore_eos=True), POLICY)
    engine.engine.add(again)
    ids = []
    while engine.engine.has_work:
        for emission in engine.engine.step():
            ids += list(emission.result.token_ids)  # type: ignore[union-attr]
    assert ids == make("qwen", 0).ask([live(25, 8)], max_tokens=4).ids


def test_segments_that_are_encoded_while_others_decode(make: Make) -> None:
    engine, plain = make("qwen", AHEAD, max_step_tokens=64), make("qwen", 0)
    first = engine.add([live(20, 3)], max_tokens=30)
    take_steps(engine, 3)
    prompt = [seg(60, 1), seg(90, 2), live(6, 3)]
    second = engine.add(prompt, max_tokens=8)
    engine.run()
    assert first.ids == plain.ask([live(20, 3)], max_tokens=30).ids
    assert second.ids == plain.ask(prompt, max_tokens=8).ids
