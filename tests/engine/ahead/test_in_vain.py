"""Of a decode step that was launched ahead in vain nothing is left: no state, no random number, no memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hypic.engine.ahead import Launching
from hypic.engine.chain import Chain
from hypic.engine.request import Request
from hypic.errors import NonFiniteOutput
from tests.engine.ahead.asking import AHEAD, PATHS, SAMPLINGS, Make, are_equal, snapshots, take_steps, told
from tests.engine.answer import Answer
from tests.engine.harness import Bench
from tests.engine.prompts import few_segments, flat, live, many_segments


def _stop_of(engine: Bench, place: int, **sampling: Any) -> str:
    """A text that ends an answer to few segments at its token number ``place``, and no sooner."""
    ids = engine.ask(few_segments(), max_tokens=place + 8, **sampling).ids
    assert ids.index(ids[place]) == place, "choose another place"
    return chr(0x4E00 + ids[place])


def ended(engine: Bench, stop: str) -> Answer:
    answer = engine.ask(few_segments(), max_tokens=40, stop=(stop,))
    assert answer.pieces[-1].finish_reason == "stop"
    return answer


def _in_place(patch: pytest.MonkeyPatch) -> None:
    """A step that is launched ahead overwrites the running state."""
    sound = Request.decode_chain

    def faulty(self: Request, slot: int, is_ahead: bool = False) -> Chain:
        return replace(sound(self, slot, is_ahead), final_slot=self._held().state_slot)

    patch.setattr(Request, "decode_chain", faulty)


def _counted(patch: pytest.MonkeyPatch) -> None:
    """A step that is launched ahead counts as done at once, so its state is kept."""
    sound = Launching.behind

    def faulty(self: Launching, work: Any) -> Any:
        following = sound(self, work)
        for run in following.work.requests if following is not None else ():
            run.request._held().turn_to(run.chain.final_slot)
        return following

    patch.setattr(Launching, "behind", faulty)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["qwen", "minimax", "qwen-attention"])
def test_a_step_in_vain_leaves_no_trace(name: str, path: str, make: Make, launches: list[int]) -> None:
    stop = _stop_of(make(name, 0, path), 3)
    plain, engine = make(name, 0, path), make(name, AHEAD, path)
    expected, answer = ended(plain, stop), ended(engine, stop)
    assert len(launches) == len(answer.ids) - 1, "a step for each token but two, and one in vain"
    assert told(answer) == told(expected)
    assert are_equal(snapshots(engine), snapshots(plain)) and len(snapshots(engine)) > 0
    assert engine.pool.free == plain.pool.free and len(engine.pool.ahead) == AHEAD
    assert engine.store.stats == plain.store.stats


@pytest.mark.parametrize("fault", [_in_place, _counted])
def test_a_trace_would_show(fault: Any, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = _stop_of(make("qwen", 0), 3)
    plain, engine = make("qwen", 0), make("qwen", AHEAD)
    ended(plain, stop)
    fault(monkeypatch)
    ended(engine, stop)
    assert not are_equal(snapshots(engine), snapshots(plain))


@pytest.mark.parametrize("num", [0, AHEAD])
def test_the_next_turn_goes_on_behind_the_snapshot(num: int, make: Make) -> None:
    """And is answered as if nothing had been kept."""
    engine = make("qwen", num)
    stop = _stop_of(make("qwen", 0), 3)
    answer = ended(engine, stop)
    said = replace(live(1, 1), ids=tuple(answer.ids), is_answer=True)
    further = [*few_segments(), said, live(12, 9)]
    next_turn = engine.ask(further, max_tokens=9)
    assert next_turn.report.reused_tokens == len(flat(few_segments())) + len(answer.ids) - 1
    fresh = make("qwen", 0).ask(further, max_tokens=9)
    assert next_turn.ids == fresh.ids and fresh.report.reused_tokens == 0
    assert engine.ask(few_segments(), max_tokens=12).ids == make("qwen", 0).ask(few_segments(), max_tokens=12).ids


def test_no_step_is_launched_behind_the_last_token(make: Make, launches: list[int]) -> None:
    engine = make("qwen", AHEAD)
    assert len(engine.ask(few_segments(), max_tokens=6).ids) == 6
    assert len(launches) == 4, "the first token comes of a step that encodes, and the second is not launched behind it"
    engine.ask([live(20, 1)], max_tokens=6)
    assert len(launches) == 4 + 5
    engine.ask([live(21, 1)], max_tokens=1)
    assert len(launches) == 4 + 5


def test_random_numbers_are_not_drawn_in_vain(make: Make) -> None:
    sampling = SAMPLINGS["seeded"]
    stop = _stop_of(make("qwen", 0), 6, **sampling)
    states = []
    for num in (0, AHEAD):
        engine = make("qwen", num)
        answer = engine.add(few_segments(), max_tokens=40, stop=(stop,), **sampling)
        state = engine.engine._answers[engine.id_of(answer)].sampling
        engine.run()
        states.append((state._num_drawn, state._number, len(state.generated_ids)))
        assert state._num_drawn == len(answer.ids) == 7
    assert states[0] == states[1]


def test_a_request_that_is_called_off_takes_its_step_with_it(make: Make, launches: list[int]) -> None:
    engine, plain = make("qwen", AHEAD), make("qwen", 0)
    kept, gone = (engine.add(pieces, max_tokens=30) for pieces in (few_segments(), [live(20, 3)]))
    take_steps(engine, 6)
    assert launches[-1] == 2
    engine.abort(gone)
    engine.assert_sound()
    late = engine.add([live(25, 8)], max_tokens=5)
    engine.run()
    engine.assert_back_to_start()
    assert kept.ids == plain.ask(few_segments(), max_tokens=30).ids
    assert late.ids == plain.ask([live(25, 8)], max_tokens=5).ids


def test_all_are_called_off_and_others_come(make: Make) -> None:
    engine, plain = make("qwen", AHEAD), make("qwen", 0)
    for answer in [engine.add(few_segments(), max_tokens=30), engine.add([live(20, 3)], max_tokens=30)]:
        take_steps(engine, 4)
        engine.abort(answer)
    assert not engine.engine.has_work
    engine.assert_sound()
    assert engine.ask(many_segments(), max_tokens=9).ids == plain.ask(many_segments(), max_tokens=9).ids
    engine.assert_back_to_start()


def test_a_request_that_fails_takes_its_step_with_it(make: Make) -> None:
    engine, plain = make("qwen", AHEAD), make("qwen", 0)
    kept, bad = (engine.add(pieces, max_tokens=30) for pieces in (few_segments(), [live(20, 3)]))
    take_steps(engine, 6)
    request = engine.engine.scheduler.running[engine.id_of(bad)]
    for states in engine.pool.states:
        states[request.held.other_slot] = float("nan")  # type: ignore[union-attr]
    engine.run()
    assert isinstance(bad.error, NonFiniteOutput)
    assert kept.ids == plain.ask(few_segments(), max_tokens=30).ids
    engine.assert_back_to_start()
