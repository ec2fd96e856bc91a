"""Decode steps that are launched before the token of the step before has been read: answers and
states are as if each had waited, for every way to sample, path and family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.ahead import Launching
from hypic.engine.chain import Chain
from hypic.engine.engine import Engine
from hypic.engine.pool import Layout
from hypic.engine.runner import Runner
from hypic.engine.sizing import ahead_of
from hypic.engine.task import Task, Vocabulary
from hypic.types import SamplingParams
from tests.checkpoints import qwen
from tests.engine.ahead.asking import AHEAD, PATHS, SAMPLINGS, Make, are_equal, snapshots, some_requests, told
from tests.engine.expected import relative
from tests.engine.harness import Bench
from tests.engine.models.every_model import BUILDERS
from tests.engine.prompts import POLICY, few_segments, live, many_segments
from tests.engine.recorded import with_recorded_steps


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
