"""Memory for decode steps that are launched ahead: what it may take, whose it is, and what if there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.chain import Chain
from hypic.engine.kernel_buffer import Sent
from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic.engine.runner import Runner
from hypic.engine.sizing import MOST_AHEAD, needed_bytes, num_ahead, split_of
from tests.engine.ahead.asking import AHEAD, SAMPLINGS, Make
from tests.engine.prompts import few_segments, live
from tests.engine.stress import Stress


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
    assert len(stress.aborted) > 2 and engine.store.stats.evictions > 5 and len(launches) > 50 and max(launches) > 1


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


def test_slots_for_states_ahead_are_nobody_elses(make: Make) -> None:
    pool: Pool = make("qwen", AHEAD).pool
    assert pool.capacity.states == pool.num_states and len(pool.ahead) == AHEAD
    taken = [pool.take_state() for _ in range(pool.num_states)]
    assert not {*taken, 0, pool.spare_state} & set(pool.ahead)
    assert all(len(states) == pool.spare_state + 1 for states in (*pool.states, *pool.tails))
