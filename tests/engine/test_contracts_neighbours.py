"""Contract 6: who runs beside a request does not change its answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine import scheduler
from hypic.engine.batch import Batch
from hypic.engine.plan import Piece
from hypic.engine.request import Request
from hypic.engine.runner import Runner
from hypic.errors import NonFiniteOutput
from hypic.types import Segment
from tests.checkpoints import random_ids
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import PROMPTS

Make = Callable[..., Bench]
DTYPES = list(TOLERANCE)
MODELS = ["qwen", "minimax", "minimax-partial"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_equals_its_requests_one_at_a_time(
    name: str, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    engine = bench(name, dtype, max_running=5)
    answers = [engine.add(pieces, max_tokens=3 + i) for i, pieces in enumerate(PROMPTS)]
    engine.run()
    for i, (pieces, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        expected = checkpoints.expected(name, pieces, generated=answer.ids[:-1])
        assert answer.error_to(expected) < TOLERANCE[dtype]
        alone = bench(name, dtype).ask(pieces, max_tokens=3 + i)
        assert alone.ids == answer.ids
        assert relative(alone.rows(), answer.rows()) < TOLERANCE[dtype]
    engine.assert_back_to_start()


@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_join_and_leave_between_steps(
    dtype: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    for name in ("qwen", "minimax"):
        engine, answers = bench(name, dtype, max_step_tokens=40), []
        for pieces in PROMPTS:
            answers.append(engine.add(pieces, max_tokens=4))
            engine.step()
            engine.step()
        engine.run()
        for pieces, answer in zip(PROMPTS, answers, strict=True):
            expected = checkpoints.expected(name, pieces, generated=answer.ids[:-1])
            assert answer.error_where_run(expected) < TOLERANCE[dtype]
            assert len(answer.ids) == 4


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_batches_bite(name: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chains of a batch share one running state."""
    sound, slots = Request._chain, []

    def faulty(self: Request, *args, **options):  # type: ignore[no-untyped-def]
        chain = sound(self, *args, **options)
        slots.append(chain.final_slot)
        object.__setattr__(chain, "initial_slot", slots[0] if self.done else 0)
        return chain

    monkeypatch.setattr(Request, "_chain", faulty)
    for dtype in DTYPES:
        slots.clear()
        engine = bench(name, dtype)
        answers = [engine.add(pieces, max_tokens=3) for pieces in PROMPTS[:3]]
        engine.run()
        for pieces, answer in zip(PROMPTS[1:3], answers[1:], strict=True):
            expected = checkpoints.expected(name, pieces, generated=answer.ids[:-1])
            assert answer.error_to(expected) > 100 * TOLERANCE[dtype]


POISON = 319


@pytest.fixture(scope="module")
def poisoned(checkpoints: Checkpoints) -> dict[str, Runner]:
    """Models for which one token is not a number."""
    config = EngineConfig(device="cpu", dtype="float64", memory="16MiB", max_context=2048, max_running=4)
    runners = {name: Runner.load(checkpoints.folder(name), config) for name in ("qwen", "minimax")}
    for runner in runners.values():
        runner.model.embed_tokens.weight.data[POISON] = float("nan")  # type: ignore[attr-defined]
    return runners


def clean(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(num_tokens, seed, vocab_size=POISON))


def bad(num_tokens: int, seed: int, at: int) -> tuple[int, ...]:
    ids = clean(num_tokens, seed)
    return (*ids[:at], POISON, *ids[at + 1 :])


def document(ids: tuple[int, ...]) -> Piece:
    return Piece(ids, Segment("document"))


SHARED = document(clean(30, 1))
POISONED = {
    "head": [Piece(bad(50, 2, 3), None, True), SHARED, Piece(clean(5, 3))],
    "tail": [Piece(clean(50, 2), None, True), SHARED, Piece(bad(5, 3, 4))],
    "seam": [Piece(clean(5, 2)), SHARED, document(bad(40, 4, 2)), Piece(clean(5, 3))],
    "interior": [Piece(clean(5, 2)), SHARED, document(bad(140, 4, 120)), Piece(clean(5, 3))],
    "last of interior": [Piece(clean(5, 2)), document(bad(40, 4, 39)), SHARED, Piece(clean(5, 3))],
}
HEALTHY = [[Piece(clean(5 + i, 10 + i)), SHARED, document(clean(20 + i, 20 + i)), Piece(clean(4, 30))] for i in (0, 1)]


@pytest.mark.parametrize("max_step_tokens", [16, 64, 8192])
@pytest.mark.parametrize("where", POISONED)
@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_a_poisoned_request_fails_alone(
    name: str, where: str, max_step_tokens: int, poisoned: dict[str, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    engine = Bench(poisoned[name], max_step_tokens=max_step_tokens)
    sick = [engine.add(POISONED[where], max_tokens=3), engine.add(POISONED[where], max_tokens=3, temperature=1.0)]
    healthy = [engine.add(pieces, max_tokens=3) for pieces in HEALTHY]
    sick.append(engine.add(POISONED[where], max_tokens=3))
    while engine.engine.has_work:
        engine.step()
        engine.assert_sound()
    for answer in sick:
        assert isinstance(answer.error, NonFiniteOutput) and not answer.ids
        assert str(answer.error).endswith(".") and "dtype" in str(answer.error)
    _assert_as_alone(poisoned[name], healthy)
    _assert_finite(engine)
    again = engine.add(POISONED[where])
    engine.run()
    assert isinstance(again.error, NonFiniteOutput), "a failed segment is not answered from the cache"
    engine.assert_back_to_start()


def _assert_as_alone(runner: Runner, healthy: list[Answer]) -> None:
    for pieces, answer in zip(HEALTHY, healthy, strict=True):
        alone = Bench(runner).ask(pieces, max_tokens=3)
        assert answer.error is None and answer.ids == alone.ids
        assert relative(answer.rows(), alone.rows()) < TOLERANCE["float64"]


def _assert_finite(engine: Bench) -> None:
    pool = engine.pool
    for entry in engine.store:
        assert all(states[entry.state_slot].isfinite().all() for states in (*pool.states, *pool.tails))
        slots = torch.from_numpy(entry.kv_slots)
        assert all(part.isfinite().all() for n in range(len(pool.keys)) for part in pool.read_kv(n, slots))
        if entry.transition_slot is not None:
            assert all(t[entry.transition_slot].isfinite().all() for t in pool.transitions)


@pytest.mark.parametrize("where", ["seam", "interior"])
@pytest.mark.parametrize("max_step_tokens", [16, 8192])
def test_warming_a_poisoned_segment_fails(
    where: str, max_step_tokens: int, poisoned: dict[str, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    engine = Bench(poisoned["qwen"], max_step_tokens=max_step_tokens)
    sick = engine.add([POISONED[where][2], Piece((0,))], warm=True)
    well = engine.add([SHARED, Piece((0,))], warm=True)
    engine.run()
    assert isinstance(sick.error, NonFiniteOutput)
    assert well.error is None and well.outcomes == ["encoded"]
    assert engine.num_segments == 1
    engine.assert_back_to_start()


@pytest.mark.parametrize("token", [1, 2, 3])
def test_a_result_that_breaks_while_decoding_fails_alone(token: int, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen")
    sound = engine.watched.forward_final

    def faulty(batch: Batch, pool: object) -> tuple[Tensor, Tensor]:
        hidden, finite = sound(batch, pool)  # type: ignore[arg-type]
        if engine.num_steps == token:
            hidden[0] = float("nan")
        return hidden, finite

    engine.watched.forward_final = faulty  # type: ignore[method-assign]
    answers = [engine.add(pieces, max_tokens=4) for pieces in PROMPTS[1:3]]
    engine.run()
    assert isinstance(answers[0].error, NonFiniteOutput) and len(answers[0].ids) == token - 1
    expected = checkpoints.expected("qwen", PROMPTS[2], generated=answers[1].ids[:-1])
    assert answers[1].error_to(expected) < TOLERANCE["float64"] and len(answers[1].ids) == 4
    engine.assert_back_to_start()
