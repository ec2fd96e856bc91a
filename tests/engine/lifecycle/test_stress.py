"""Whatever the order of events, counters return to where they started and every answer is that of a request alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.engine.harness import Bench
from tests.engine.stress import Stress

Make = Callable[..., Bench]


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_stress(name: str, bench: Make) -> None:
    stress = Stress(bench(name, max_step_tokens=48, sizes=(40, 24, 12)), lambda: bench(name), seed=1)
    stress.run(150)
    stress.check(at_most=20)
    assert len(stress.aborted) > 5 and sum(stress.engine.restarts.values()) > 0
    assert stress.engine.store.stats.evictions > 20 and stress.engine.store.stats.hits > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["qwen", "minimax", "minimax-partial"])
def test_long_stress(name: str, seed: int, bench: Make) -> None:
    sizes = random.Random(seed).choice([(28, 14, 7), (40, 9, 5), (24, 30, 10), (200, 12, 5)])
    engine = bench(name, max_step_tokens=random.Random(seed).choice([1, 20, 64, 8192]), sizes=sizes)
    stress = Stress(engine, lambda: bench(name), seed)
    stress.run(1500)
    stress.check()
