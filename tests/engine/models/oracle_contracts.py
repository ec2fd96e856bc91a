"""What the engine owes to any model that transformers has: each function gives the largest relative error found.

Truth is transformers' full recompute, widened to float64, where theory says that reuse is exact: for live text, for a
prompt that begins with its only segment, and for one mixing layer. Elsewhere the engine is compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine import scheduler
from hypic.engine.batch import Batch
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.types import Policy
from tests.checkpoints_mamba import exact_logits, oracle_logits
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, flat, live, many_segments, only_segment, seg

Make = Callable[[Path], Path]
Prompt = Sequence[Piece]


class Models:
    """Checkpoints by name, made when they are first asked for, with their engines' models and true logits."""

    def __init__(self, makers: Mapping[str, Make], make_folder: Callable[[str], Path]) -> None:
        self.folder = cache(lambda name: makers[name](make_folder(name) / "checkpoint"))
        self._exact = cache(lambda name, ids: exact_logits(self.folder(name), ids))
        self._single = cache(lambda name, ids: oracle_logits(self.folder(name), ids))
        self.runner = cache(self.load)
        self._alone = cache(lambda name, pieces, *how: self.bench(name).ask(pieces, *how))

    def load(self, name: str, dtype: str) -> Runner:
        config = EngineConfig(device="cpu", dtype=dtype, memory="16MiB", max_context=1024, max_running=4)
        return Runner.load(self.folder(name), config)

    def bench(
        self,
        name: str,
        dtype: str = "float64",
        max_step_tokens: int = 8192,
        sizes: tuple[int, int, int] = (200, 48, 24),
        **options: Any,
    ) -> Bench:
        loaded = self.runner(name, dtype)
        settings = {"max_context": 1024, "max_running": 4, "max_step_tokens": max_step_tokens, **options}
        return Bench(loaded, sizes=sizes, **settings)

    def alone(self, name: str, pieces: Prompt, policy: Policy = POLICY, max_tokens: int = 1) -> Answer:
        """What a fresh engine answers, run once for all: a test that breaks the engine asks before it does."""
        answer: Answer = self._alone(name, tuple(pieces), policy, max_tokens)
        return answer

    def truth(self, name: str, ids: Sequence[int], dtype: str = "float64") -> Tensor:
        """``[N, V]`` in float64; for float32 what transformers gives in it."""
        logits: Tensor = (self._exact if dtype == "float64" else self._single)(name, tuple(ids))
        return logits


def error_to_truth(models: Models, name: str, prompt: Prompt, answer: Answer, dtype: str = "float64") -> float:
    truth = models.truth(name, [*flat(prompt), *answer.ids[:-1]], dtype)
    return relative(answer.rows(), truth[sorted(answer.logits)])


def live_error(models: Models, name: str, dtype: str) -> float:
    """Live text and an answer of some tokens, against transformers; in float64 other tokens are as far as can be."""
    prompt = [live(90, 9)]
    answer = models.bench(name, dtype).ask(prompt, max_tokens=5)
    best = models.truth(name, [*flat(prompt), *answer.ids[:-1]], dtype)[-len(answer.ids) :].argmax(-1).tolist()
    if dtype == "float64" and best != answer.ids:
        return float("inf")
    return error_to_truth(models, name, prompt, answer, dtype)


def segment_error(models: Models, name: str, dtype: str, prompt: Prompt, **options: Any) -> float:
    """A prompt for which reuse is exact, cold and warm, against transformers in float64."""
    engine = models.bench(name, dtype, **options)
    cold, warm = engine.ask(prompt), engine.ask(prompt)
    assert "encoded" in cold.outcomes and "hit" in warm.outcomes and len(warm.logits) <= len(cold.logits)
    return max(error_to_truth(models, name, prompt, answer) for answer in (cold, warm))


def head_error(models: Models, name: str, dtype: str = "float64") -> float:
    """A prompt that begins with its only segment."""
    return segment_error(models, name, dtype, only_segment())


def single_error(models: Models, name: str, dtype: str = "float64", **options: Any) -> float:
    """Many segments, in a model of one mixing layer."""
    return segment_error(models, name, dtype, many_segments(), **options)


def pieces_error(models: Models, name: str, num_tokens: int, patch: pytest.MonkeyPatch) -> float:
    """Live text in pieces against transformers, segments in pieces against one pass."""
    patch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    prompt, engine = [live(90, 9)], models.bench(name, max_step_tokens=num_tokens)
    answer = engine.ask(prompt)
    assert max(answer.runs) <= num_tokens
    whole = models.alone(name, few_segments())
    parts = engine.ask(few_segments())
    return max(error_to_truth(models, name, prompt, answer), difference(parts, whole))


def batch_error(models: Models, name: str) -> float:
    """Requests that run together against each alone, answers of several tokens included."""
    prompts = [few_segments(), [live(33, 31)], [seg(30, 2), live(3, 32)], [live(1, 33), seg(30, 2), live(2, 34)]]
    engine = models.bench(name)
    together = [engine.add(prompt, max_tokens=4) for prompt in prompts]
    engine.run()
    alone = [models.alone(name, prompt, max_tokens=4) for prompt in prompts]
    engine.assert_back_to_start()
    return max(difference(one, other) for one, other in zip(together, alone, strict=True))


def order_error(models: Models, name: str, harm: Callable[[Bench], None] = lambda engine: None) -> float:
    """Segments of one prompt in another order, from what was cached, against a fresh engine; then the first again."""
    head, one, two, three, tail = live(5, 1), seg(30, 2), seg(41, 3), seg(19, 5), live(9, 6)
    engine = models.bench(name)
    first = engine.ask([head, one, two, three, tail])
    harm(engine)
    errors = []
    for order in ((three, one, two), (two, three, one)):
        moved = engine.ask([head, *order, tail])
        assert moved.outcomes == ["hit"] * 3
        errors.append(difference(moved, models.alone(name, [head, *order, tail])))
    again = engine.ask([head, one, two, three, tail])
    engine.store.clear()
    return max(*errors, difference(again, first), difference(engine.ask([head, one, two, three, tail]), first))


def difference(answer: Answer, other: Answer) -> float:
    """Over the rows that both have run; the last one always is. Other tokens are as far as can be."""
    if answer.ids != other.ids:
        return float("inf")
    shared = sorted(answer.logits.keys() & other.logits.keys())
    assert max(answer.logits) == max(other.logits), "the last row of both must be compared"
    return relative(answer.rows(shared), other.rows(shared))


# -- bugs ------------------------------------------------------------------------------------------------------------


def halve_transitions(engine: Bench) -> None:
    """What is stored of segments is not what was computed: every ``T`` is halved."""
    for transition in engine.pool.transitions:
        transition.mul_(0.5)


def halve_values(engine: Bench) -> None:
    """The same of attention's values."""
    for values in engine.pool.values:
        values.mul_(0.5)


def halve_states(engine: Bench) -> None:
    """The same of states, of segments and of what has been run."""
    for states in engine.pool.states:
        states.mul_(0.5)


def halve_tails(engine: Bench) -> None:
    """The same of convolutions' tails."""
    for tail in engine.pool.tails:
        tail.mul_(0.5)


def forget_a_key(patch: pytest.MonkeyPatch, which: slice = slice(25, 26)) -> None:
    """One position of every longer context is read as zeros, or others."""
    from hypic.engine.pool import Pool

    sound = Pool.read_kv

    def faulty(self: Pool, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (tensor.clone() for tensor in sound(self, layer, slots))
        keys[which], values[which] = 0.0, 0.0
        return keys, values

    patch.setattr(Pool, "read_kv", faulty)


def start_from_nothing(patch: pytest.MonkeyPatch) -> None:
    """A second piece begins with no state, as the first did."""
    from hypic.engine.request import Request

    sound = Request._chain

    def faulty(self: Request, *args: object, **options: object) -> object:
        chain = sound(self, *args, **options)  # type: ignore[arg-type]
        object.__setattr__(chain, "initial_slot", 0)
        return chain

    patch.setattr(Request, "_chain", faulty)


def swap_states(patch: pytest.MonkeyPatch) -> None:
    """The states of requests that run together are written into each other's slots."""
    from dataclasses import replace

    from hypic.engine import batch

    sound = batch.scan_plan

    def faulty(*args: object) -> batch.ScanPlan:
        plan = sound(*args)  # type: ignore[arg-type]
        return replace(plan, write_slots=torch.flip(plan.write_slots, (0,)))

    patch.setattr(batch, "scan_plan", faulty)


def swap_tails(patch: pytest.MonkeyPatch) -> None:
    """The same of convolutions' tails, in models whose layers keep nothing else."""
    from dataclasses import replace

    from hypic.engine.layers import conv, short_conv

    sound = conv.convolve_rows

    def faulty(x: Tensor, weight: Tensor, batch: Batch, *args: Any) -> Tensor:
        plan = replace(batch.conv, write_slots=batch.conv.write_slots.flip(0))
        return sound(x, weight, replace(batch, conv=plan), *args)

    patch.setattr(short_conv, "convolve_rows", faulty)


def bites(error: float, tolerance: float = TOLERANCE["float64"]) -> bool:
    return error > 100 * tolerance
