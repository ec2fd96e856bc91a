"""Contract 5: a request that was preempted and is resumed answers as if it had run through."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hypic.engine.plan import Plan
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import live, many_segments, seg

Make = Callable[..., Bench]
WIDE = [("qwen", "float64"), ("qwen", "float32"), ("minimax", "float64"), ("minimax-partial", "float64")]
# Pages, states and transitions that three long answers do not all find room in.
TIGHT = {"page_size": 8, "sizes": (30, 8, 4)}


@pytest.mark.parametrize(("name", "dtype"), WIDE)
def test_preemption_and_resume_equal_running_through(
    name: str, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    """Three long answers in a pool that holds not all of them: someone starts again, and nobody can tell."""
    engine = bench(name, dtype, **TIGHT)
    prompts = [[live(5 + i, i), seg(30, 10 + i), live(9, 20 + i)] for i in range(3)]
    answers = [engine.add(pieces, max_tokens=60) for pieces in prompts]
    engine.run()
    assert sum(engine.restarts.values()) > 0, "the pool was too large to preempt anyone"
    for pieces, answer in zip(prompts, answers, strict=True):
        assert answer.error is None and len(answer.ids) == 60
        expected = checkpoints.expected(name, pieces, generated=answer.ids[:-1])
        assert answer.error_to(expected) < TOLERANCE[dtype]
    engine.assert_back_to_start()


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_preemption_bites(name: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that starts again has forgotten the last token that it had generated."""
    sound = Plan.continued
    monkeypatch.setattr(Plan, "continued", lambda self, generated: sound(self, [*generated[:-1], 3]))
    engine = bench(name, **TIGHT)
    prompts = [[live(5 + i, i), seg(30, 10 + i), live(9, 20 + i)] for i in range(3)]
    answers = [engine.add(pieces, max_tokens=60) for pieces in prompts]
    engine.run()
    errors = [
        answer.error_to(checkpoints.expected(name, pieces, generated=answer.ids[:-1]))
        for pieces, answer in zip(prompts, answers, strict=True)
    ]
    assert max(errors) > 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("stage", [1, 2, 3, 5])
def test_preempted_at_any_stage(stage: int, bench: Make, checkpoints: Checkpoints) -> None:
    """Taken out by hand while it encodes, prefills or decodes; what was generated is kept."""
    for name in ("qwen", "minimax"):
        engine = bench(name, max_step_tokens=64)
        answer = engine.add(many_segments(), max_tokens=6)
        for _ in range(stage):
            engine.step()
        request = engine.engine.scheduler.running[engine.id_of(answer)]
        engine.engine.scheduler.preempt(request)
        engine.assert_sound()
        engine.run()
        expected = checkpoints.expected(name, many_segments(), generated=answer.ids[:-1])
        assert answer.error_to(expected) < TOLERANCE["float64"]
        assert len(answer.ids) == 6 and request.restarts == 1
        engine.assert_back_to_start()
