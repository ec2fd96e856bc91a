"""Decode steps that are launched before the token of the step before has been read: answers, states, reports and memory
are as if each had waited, and of a step that was launched in vain nothing is left."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.ahead import Launching
from hypic.engine.chain import Chain
from hypic.engine.engine import Engine
from hypic.engine.kernel_buffer import Sent
from hypic.engine.loop import EngineLoop
from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic.engine.read_back import ReadBack
from hypic.engine.request import Request
from hypic.engine.runner import Runner
from hypic.engine.scheduler import Scheduler
from hypic.engine.sizing import MOST_AHEAD, ahead_of, needed_bytes, num_ahead, split_of
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.errors import NonFiniteOutput
from hypic.types import CacheReport, SamplingParams
from tests.checkpoints import qwen
from tests.engine.harness import POLICY, Answer, Bench, few_segments, flat, live, many_segments, relative, seg
from tests.engine.models.every_model import BUILDERS
from tests.engine.recorded import with_recorded_steps
from tests.engine.test_lifecycle import Stress

Make = Callable[..., Bench]
Asked = Mapping[str, Any]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 8, "logprobs": 2},
    "penalized": {"temperature": 0.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 9},
    "frequent": {"temperature": 0.0, "frequency_penalty": 1.5},
}
PATHS = ["plain", "kernels", "recorded"]
AHEAD = 4


@pytest.fixture
def make(bench: Make) -> Make:
    def made(name: str, num_ahead: int, path: str = "plain", **settings: Any) -> Bench:
        dtype, kernels = ("float64", "off") if path == "plain" else ("float32", "on")
        found = bench(name, dtype, num_ahead=num_ahead, kernels=kernels, **settings)
        found.watched.is_noting = False
        if path == "recorded":
            found.engine.runner = with_recorded_steps(found.engine.runner)
        return found

    return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each step had that was launched ahead."""
    seen, launch = list[int](), Runner.launch

    def counted(self: Runner, chains: Sequence[Chain], ids: Tensor | None = None) -> Any:
        if ids is not None:
            seen.append(len(chains))
        return launch(self, chains, ids)

    monkeypatch.setattr(Runner, "launch", counted)
    return seen


def told(answer: Answer) -> tuple[Any, ...]:
    """All that a client sees of an answer but how long it took."""
    last = answer.pieces[-1]
    text = "".join(piece.text for piece in answer.pieces)
    found = [one for piece in answer.pieces for one in piece.logprobs]
    values = [pytest.approx(value, rel=1e-4) for one in found for value in (one.logprob, *(v for _, v in one.top))]
    logprobs = [(one.token_id, *(id for id, _ in one.top)) for one in found], values
    return answer.ids, text, last.finish_reason, last.usage, _seen(last.report), logprobs


def _seen(report: CacheReport | None) -> Any:
    return None if report is None else replace(report, times_s={})


def snapshots(engine: Bench) -> dict[bytes, list[Tensor]]:
    """All that snapshots hold, by name."""
    pool, found = engine.pool, {}
    for entry in engine.store:
        if entry.is_snapshot:
            slots = torch.from_numpy(entry.kv_slots)
            kept = [*pool.states, *pool.tails]
            found[entry.key] = [tensor[entry.state_slot].clone() for tensor in kept]
            found[entry.key] += [t.clone() for n in range(len(pool.keys)) for t in pool.read_kv(n, slots)]
    return found


def are_equal(one: Mapping[bytes, list[Tensor]], other: Mapping[bytes, list[Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for key in one for a, b in zip(one[key], other[key], strict=True)
    )


def some_requests(engine: Bench, sampling: Asked) -> list[Answer]:
    """Requests that join and leave while others decode: by length, by a stop string, called off."""
    answers = [engine.add(few_segments(), max_tokens=12, **sampling)]
    _step(engine, 4)
    answers.append(engine.add(many_segments(), max_tokens=5, **sampling))
    answers.append(engine.add([live(33, 4)], max_tokens=40, **sampling))
    _step(engine, 3)
    answers.append(engine.add([live(21, 5)], max_tokens=1, **sampling))
    _step(engine, 5)
    engine.abort(answers[2])
    answers.append(engine.add([live(9, 6)], max_tokens=6, stop=(chr(0x4E00 + 5), chr(0x4E00 + 9)), **sampling))
    engine.run()
    engine.assert_back_to_start()
    return [answer for number, answer in enumerate(answers) if number != 2]


def _step(engine: Bench, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.assert_sound()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_the_same(sampling: str, path: str, make: Make, launches: list[int]) -> None:
    expected = [told(answer) for answer in some_requests(make("qwen", 0, path), SAMPLINGS[sampling])]
    assert not launches
    found = [told(answer) for answer in some_requests(make("qwen", AHEAD, path), SAMPLINGS[sampling])]
    assert found == expected and len(launches) > 10 and max(launches) > 1


@pytest.mark.parametrize("name", ["minimax", "qwen-conv-2", "qwen-attention", "qwen-linear"])
def test_answers_are_the_same_for_other_models(name: str, make: Make, launches: list[int]) -> None:
    for path in PATHS[:: 2 if name != "qwen-linear" else 1]:
        expected, found = (
            [told(answer) for answer in some_requests(make(name, num, path), SAMPLINGS["seeded"])] for num in (0, AHEAD)
        )
        assert found == expected
    assert len(launches) > 10


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_a_trace_is_left_by_no_family(name: str, tmp_path: Path, launches: list[int]) -> None:
    config = EngineConfig(device="cpu", dtype="float32", memory="64MiB", max_context=4096, max_running=4)
    loaded = Runner.load(BUILDERS[name](tmp_path / name), config)
    seen, stop = list[Any](), ""
    for num in (0, 0, AHEAD):  # the first one only shows where to stop
        engine = Bench(loaded, num_ahead=num, kernels="on")
        engine.watched.is_noting = False
        if loaded.model.is_recordable:
            engine.engine.runner = with_recorded_steps(engine.engine.runner, warm_tokens=(64,))
        answer = engine.ask([live(40, 1)], max_tokens=12, stop=(stop,) if stop else ())
        stop = stop or chr(0x4E00 + max(answer.ids, key=answer.ids.index))
        seen.append((answer, snapshots(engine)))
    (_, plain, ahead), count = seen, len(seen[2][0].ids)
    assert told(plain[0]) == told(ahead[0]) and are_equal(plain[1], ahead[1]) and len(ahead[1]) == 1
    assert len(launches) == min(count, 11), "a step for each token but the first, and one in vain"


def test_an_answer_depends_on_the_token_that_only_the_device_knows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a step that is run on another token answers something else."""
    expected = [told(answer) for answer in some_requests(make("qwen", 0), SAMPLINGS["greedy"])]
    launch = Runner.launch

    def faulty(self: Runner, chains: Sequence[Chain], ids: Tensor | None = None) -> Any:
        return launch(self, chains)

    monkeypatch.setattr(Runner, "launch", faulty)
    assert [told(answer) for answer in some_requests(make("qwen", AHEAD), SAMPLINGS["greedy"])] != expected


# -- steps in vain ---------------------------------------------------------------------------------------------------


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
    _step(engine, 6)
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
        _step(engine, 4)
        engine.abort(answer)
    assert not engine.engine.has_work
    engine.assert_sound()
    assert engine.ask(many_segments(), max_tokens=9).ids == plain.ask(many_segments(), max_tokens=9).ids
    engine.assert_back_to_start()


def test_a_request_that_fails_takes_its_step_with_it(make: Make) -> None:
    engine, plain = make("qwen", AHEAD), make("qwen", 0)
    kept, bad = (engine.add(pieces, max_tokens=30) for pieces in (few_segments(), [live(20, 3)]))
    _step(engine, 6)
    request = engine.engine.scheduler.running[engine.id_of(bad)]
    for states in engine.pool.states:
        states[request.held.other_slot] = float("nan")  # type: ignore[union-attr]
    engine.run()
    assert isinstance(bad.error, NonFiniteOutput)
    assert kept.ids == plain.ask(few_segments(), max_tokens=30).ids
    engine.assert_back_to_start()


# -- who must not wait -----------------------------------------------------------------------------------------------


def test_who_comes_waits_for_one_step_at_most(make: Make) -> None:
    waited = {}
    for num in (0, AHEAD):
        engine = make("qwen", num)
        engine.add([live(20, 3)], max_tokens=40)
        _step(engine, 5)
        late, before = engine.add([live(30, 4)], max_tokens=3), engine.num_steps
        while not late.pieces:
            engine.step()
        waited[num] = engine.num_steps - before
    assert waited == {0: 1, AHEAD: 2}


def test_nothing_is_launched_before_those_who_have_come(make: Make, launches: list[int]) -> None:
    engine = make("qwen", AHEAD)
    engine.add([live(20, 3)], max_tokens=40)
    _step(engine, 5)
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
    _step(engine, 5)
    assert engine.engine._ahead is not None
    late = engine.add([live(30, 4)], max_tokens=3)
    _step(engine, 2)
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


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_memory_that_runs_out_by_pages(name: str, make: Make, launches: list[int]) -> None:
    """Pages are never made for a step that is launched ahead: who needs them gets them in a step's own time."""
    engine = make(name, AHEAD, page_size=4, sizes=(30, 24, 12))
    asked = [([live(20, 3)], 40), ([live(24, 4)], 36), ([live(9, 5)], 30)]
    answers = [engine.add(pieces, max_tokens=count) for pieces, count in asked]
    while engine.engine.has_work:
        engine.step()
        engine.assert_sound()
    assert sum(engine.restarts.values()) > 0 and launches
    roomy = make(name, 0)
    for answer, (pieces, count) in zip(answers, asked, strict=True):
        assert answer.ids == roomy.ask(pieces, max_tokens=count).ids
    engine.assert_back_to_start()


def test_more_requests_than_second_states_wait_for_their_tokens(make: Make, launches: list[int]) -> None:
    engine = make("qwen", 2)
    answers = [engine.add([live(20, seed)], max_tokens=4 + 4 * seed) for seed in range(4)]
    engine.run()
    assert set(launches) == {1, 2}
    for seed, answer in enumerate(answers):
        assert answer.ids == make("qwen", 0).ask([live(20, seed)], max_tokens=4 + 4 * seed).ids
    engine.assert_back_to_start()


@pytest.mark.parametrize("is_ahead", [True, False])
def test_memory_that_the_device_lacks(is_ahead: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that cannot be launched ahead is launched in its own time; one that cannot then is begun again."""
    engine, launch, num_failed = make("qwen", AHEAD), Runner.launch, 0

    def failing(self: Runner, chains: Sequence[Chain], ids: Tensor | None = None) -> Any:
        nonlocal num_failed
        made = launch(self, chains, ids)
        if (ids is not None) is is_ahead and self is engine.engine.runner and len(chains) == 2 and num_failed < 2:
            num_failed += 1
            raise torch.OutOfMemoryError("no room")
        return made

    monkeypatch.setattr(Runner, "launch", failing)
    prompts = few_segments(), [live(20, 3)]
    answers = [engine.add(pieces, max_tokens=12, **SAMPLINGS["seeded"]) for pieces in prompts]
    while engine.engine.has_work:
        engine.step()
        engine.assert_sound()
    assert num_failed == 2 and (sum(engine.restarts.values()) == 0) is is_ahead
    for answer, pieces in zip(answers, prompts, strict=True):
        assert answer.ids == make("qwen", 0).ask(pieces, max_tokens=12, **SAMPLINGS["seeded"]).ids
    engine.assert_back_to_start()


class Calm(Stress):
    """Who comes or goes does so every few steps, so that most of what decodes is launched ahead."""

    def act(self) -> None:
        if self.rng.random() < 0.3:
            super().act()


@pytest.mark.parametrize(("path", "seed"), [("plain", 1), ("kernels", 2), ("recorded", 4)])
def test_stress(path: str, seed: int, make: Make, launches: list[int]) -> None:
    engine = make("qwen", 8, path, max_step_tokens=48, sizes=(40, 24, 12))
    stress = Calm(engine, lambda: make("qwen", 0), seed)
    stress.run(300)
    stress.check(at_most=20)
    assert stress.num_aborted > 2 and engine.store.stats.evictions > 5 and len(launches) > 50 and max(launches) > 1


def test_slots_for_steps_ahead_are_a_small_share_of_the_budget() -> None:
    layout = Layout((LinearShape(4, 32, 32, "dense"),) * 3, (AttentionShape(2, 32, 32),), torch.float32, torch.float32)
    least, state_bytes = needed_bytes(layout, 16, 512, 32), layout.state_bytes
    for spare, expected in ((0, 0), (15 * state_bytes, 0), (16 * state_bytes, 1), (1000 * state_bytes, MOST_AHEAD)):
        found = num_ahead(layout, least + spare, 16, 512, 32)
        assert found == expected
        pool = Pool(layout, least + spare, 16, 512, 32, torch.device("cpu"), num_ahead=found)
        assert pool.num_bytes <= least + spare and len(pool.ahead) == found
    assert num_ahead(layout, least + 1000 * state_bytes, 16, 512, 2) == 2
    assert num_ahead(replace(layout, linear=()), 2**20, 16, 512, 32) == MOST_AHEAD


@pytest.mark.parametrize(("device", "num"), [("cuda:1", 3), ("cpu", 0), ("auto", 0)])
def test_the_split_that_is_foretold_has_them(device: str, num: int) -> None:
    layout = Layout((LinearShape(4, 32, 32, "dense"),) * 3, (AttentionShape(2, 32, 32),), torch.float32, torch.float32)
    config = EngineConfig(device=device, memory=2**25, max_running=3, max_context=512)
    context, need = split_of(layout, 4096, 2**25, config)
    pool = Pool(layout, 2**25, 16, context, 3, torch.device("cpu"), num_ahead=num)
    assert pool.capacity == need and len(pool.ahead) == num


def test_a_step_is_sent_from_elsewhere_than_the_one_before() -> None:
    """Whose numbers the device may not have read yet."""
    first, later = ({"ids": np.arange(n, n + 4, dtype=np.int32)} for n in (0, 10))
    sent = Sent(first, torch.device("cpu"))
    places = []
    for found in (later, first, later):
        sent.write(found)
        places.append(sent._stages[0].numbers)
        assert sent["ids"].tolist() == found["ids"].tolist()
    assert places[0] is places[2] is not places[1] and places[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("device", "graphs"), [("cpu", False), *(pytest.param("cuda", on, marks=pytest.mark.gpu) for on in (True, False))]
)
@pytest.mark.parametrize("sampling", ["greedy", "filtered", "penalized"])
def test_a_gpu_answers_the_same(
    sampling: str, device: str, graphs: bool, tmp_path: Path, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step in vain leaves no trace there either, though it is still under way when its answer has ended."""
    launch_behind = Launching.launch_behind

    def as_on_a_gpu(kept: Layout, budget: int, context: int, config: EngineConfig) -> int:
        return ahead_of(kept, budget, context, replace(config, device="cuda"))

    monkeypatch.setattr("hypic.engine.runner.ahead_of", as_on_a_gpu)
    config = EngineConfig(
        device=device, dtype="float32", memory="256MiB", max_context=2048, max_running=4, graphs=graphs
    )
    runner = Runner.load(qwen(tmp_path), config)
    assert runner.pool.num_ahead == 4
    seen, stop = list[Any](), ""
    for is_ahead in (False, False, True):  # the first one only shows where to stop
        before = len(launches)
        monkeypatch.setattr(Launching, "launch_behind", launch_behind if is_ahead else lambda *given: None)
        engine = Engine(runner, Vocabulary(lambda ids: "".join(chr(0x4E00 + i) for i in ids)), 4, 2048, None)
        found = {id: list[int]() for id in "abc"}
        for id, pieces, most in (("a", few_segments(), 24), ("b", [live(40, 2)], 9), ("c", many_segments(), 16)):
            ends = (stop,) if stop and id == "a" else ()
            sampled = SamplingParams(max_tokens=most, stop=ends, ignore_eos=True, **SAMPLINGS[sampling])
            engine.add(Task(id, pieces, sampled, POLICY))
        while engine.has_work:
            for emission in engine.step():
                found[emission.id] += list(emission.result.token_ids)  # type: ignore[union-attr]
        states = {e.key: [s[e.state_slot].clone() for s in runner.pool.states] for e in engine.store if e.is_snapshot}
        seen.append((found, states))
        stop = stop or chr(0x4E00 + found["a"][12])
        engine.store.clear()
        assert (len(launches) > before) is is_ahead
    assert seen[1][0] == seen[2][0] and len(seen[1][0]["a"]) < 24
    assert seen[1][1].keys() == seen[2][1].keys()
    for key, states in seen[1][1].items():
        for one, other in zip(states, seen[2][1][key], strict=True):
            assert relative(one, other) < 1e-4


# -- beside the engine -----------------------------------------------------------------------------------------------


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


def test_slots_for_states_ahead_are_nobody_elses(make: Make) -> None:
    pool: Pool = make("qwen", AHEAD).pool
    assert pool.capacity.states == pool.num_states and len(pool.ahead) == AHEAD
    taken = [pool.take_state() for _ in range(pool.num_states)]
    assert not {*taken, 0, pool.spare_state} & set(pool.ahead)
    assert all(len(states) == pool.spare_state + 1 for states in (*pool.states, *pool.tails))


def test_who_begins_nothing_may_change_running_requests(make: Make) -> None:
    """``Scheduler.running`` is what tells which requests of a step are left; one that came again is not the same."""
    engine = make("qwen", AHEAD)
    first = engine.add([live(20, 3)], max_tokens=40)
    _step(engine, 4)
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
    _step(engine, 3)
    prompt = [seg(60, 1), seg(90, 2), live(6, 3)]
    second = engine.add(prompt, max_tokens=8)
    engine.run()
    assert first.ids == plain.ask([live(20, 3)], max_tokens=30).ids
    assert second.ids == plain.ask(prompt, max_tokens=8).ids
