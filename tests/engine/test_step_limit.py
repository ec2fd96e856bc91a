"""Steps are smaller for a while after a shortage of memory, and nobody pays for trying larger ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from hypic.engine.step_limit import PATIENCE, StepLimit
from tests.engine.harness import Bench
from tests.engine.prompts import live

Make = Callable[..., Bench]


def short_of_memory(engine: Bench, is_short: Callable[[int], bool]) -> list[int]:
    """Steps of so many tokens find no memory where ``is_short`` says so; the sizes of those that failed."""
    sound, failed = engine.watched.forward_final, list[int]()

    def failing(batch: Any, pool: Any) -> Any:
        size = len(batch.positions)
        if is_short(size):
            failed.append(size)
            raise torch.OutOfMemoryError("no room")
        return sound(batch, pool)

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    return failed


# -- the limit -------------------------------------------------------------------------------------------------------


def test_a_shortage_halves_down_to_the_least_and_never_lifts() -> None:
    limit = StepLimit(most=1000, least=64)
    seen = []
    for _ in range(6):
        limit.ran_short()
        seen.append(limit.tokens)
    assert seen == [500, 250, 125, 64, 64, 64]
    small = StepLimit(most=16, least=64)
    small.ran_short()
    assert small.tokens == 16


def test_full_steps_double_it_up_to_the_most() -> None:
    limit = StepLimit(most=300, least=64)
    limit.ran_short(), limit.ran_short()
    seen = []
    for _ in range(2 * PATIENCE):
        limit.ran(limit.tokens)
        seen.append(limit.tokens)
    assert seen == [75] * (PATIENCE - 1) + [150] * PATIENCE + [300]


def test_steps_far_below_it_do_not() -> None:
    limit = StepLimit(most=512, least=64)
    limit.ran_short()
    for _ in range(100 * PATIENCE):
        limit.ran(127)
    assert limit.tokens == 256
    for _ in range(PATIENCE):
        limit.ran(128)
    assert limit.tokens == 512


def test_a_device_that_stays_short_is_tried_ever_more_seldom() -> None:
    limit, tried = StepLimit(most=512, least=64), []
    for number in range(100_000):
        if limit.tokens > 300:
            tried.append(number)
            limit.ran_short()
        else:
            limit.ran(limit.tokens)
    waits = [later - before for before, later in pairwise(tried)]
    assert len(tried) < 15 and all(later > 1.9 * before for before, later in pairwise(waits))


def test_good_steps_at_the_full_size_end_the_matter() -> None:
    limit = StepLimit(most=128, least=64)
    for _ in range(5):
        limit.ran_short()
        while limit.tokens < limit.most:
            limit.ran(limit.tokens)
    assert limit.has_grown
    for _ in range(32 * PATIENCE):
        limit.ran(128)
    assert not limit.has_grown
    limit.ran_short()
    for _ in range(PATIENCE):
        limit.ran(64)
    assert limit.tokens == 128, "as after the first shortage"


# -- an engine -------------------------------------------------------------------------------------------------------


def test_steps_are_as_large_as_before_some_time_after_a_shortage(bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=512)
    failed = short_of_memory(engine, lambda size: len(failed) < 3)
    expected = bench("qwen", max_step_tokens=512).ask([live(900, 0)], max_tokens=2).ids
    limits = []
    for _ in range(20):
        assert engine.ask([live(900, 0), live(1, len(limits))], max_tokens=2).error is None
        limits.append(engine.engine.scheduler.limit.tokens)
    assert len(failed) == 3 and limits == sorted(limits) and limits[0] < 512 == limits[-1]
    assert engine.ask([live(900, 0)], max_tokens=2).ids == expected
    engine.assert_back_to_start()


def test_decode_says_nothing_about_memory(bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=512)
    failed = short_of_memory(engine, lambda size: len(failed) < 2)
    engine.ask([live(200, 1)], max_tokens=200)
    assert engine.engine.scheduler.limit.tokens == 128 and engine.num_steps > 200


def test_a_long_prompt_outlasts_all_trials(bench: Make) -> None:
    """A request fails at its fourth shortage; trying larger steps must not be what it dies of."""
    engine = bench("qwen", max_step_tokens=128)
    engine.engine.scheduler.limit._patience = 1  # which would else take a longer prompt
    failed = short_of_memory(engine, lambda size: size > 64)
    answer = engine.ask([live(3000, 1)], max_tokens=1)
    assert answer.error is None and len(answer.ids) == 1 and len(failed) > 4
    engine.assert_back_to_start()
