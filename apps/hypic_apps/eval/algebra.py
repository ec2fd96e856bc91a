"""What dropping ``T`` costs, family by family: the error of composing cached segments against full recompute.

A prompt of several segments is answered once in full and once from cached segments, composed by their transitions, by
addition (``T`` taken as the identity) and by the last one alone (``T`` taken as zero). Models are tiny and random, with
dummy weights whose half-lives are spread over 16 to 16,384 tokens, so numbers compare ways of composing, not families:
how far any of them is from full recompute in a trained model is another measurement. Everything runs in float64.

Errors are relative: the norm of the difference over that of full recompute. In the first linear layer nothing but the
composition differs, so there the transition is exact; deeper layers add what reuse approximates in any case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner, StepResult
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.work import Work
from hypic.types import Compose, Policy, SamplingParams, Segment
from hypic_apps.eval.tiny import CONFIGS, config

COMPOSES: Sequence[Compose] = ("transition", "addition", "last")
HEAD_TOKENS, TAIL_TOKENS = 16, 16
SEGMENT_TOKENS = (64, 96, 48, 80)


@dataclass(frozen=True)
class Errors:
    """Relative errors against full recompute: the state behind the prompt in the first and the last linear layer, and
    the logits of its last token."""

    first_state: float
    last_state: float
    logits: float


@dataclass(frozen=True)
class Row:
    """A family's errors by the way of composing, averaged over prompts."""

    name: str
    transition: str
    errors: Mapping[Compose, Errors]


def measure(names: Sequence[str] = tuple(CONFIGS), num_prompts: int = 4) -> Iterator[Row]:
    """One row per tiny model, as they are done."""
    for name in names:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config(name)), encoding="utf-8")
            settings = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 1024, "max_running": 2}
            runner = Runner.load(Path(folder), EngineConfig.of(load_format="dummy", **settings))
        yield _row(name, runner, num_prompts)


def _row(name: str, runner: Runner, num_prompts: int) -> Row:
    prompts = [_prompt(seed, int(config(name)["vocab_size"])) for seed in range(num_prompts)]
    full = [_answer(runner, prompt, Policy(reuse="none")) for prompt in prompts]
    errors = {}
    for compose in COMPOSES:
        found = [_answer(runner, prompt, Policy(compose=compose)) for prompt in prompts]
        pairs = [_errors(one, other) for one, other in zip(found, full, strict=True)]
        errors[compose] = Errors(
            fmean(e.first_state for e in pairs), fmean(e.last_state for e in pairs), fmean(e.logits for e in pairs)
        )
    return Row(name, runner.pool.layout.linear[0].transition, errors)


def _prompt(seed: int, vocab_size: int) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (count,), generator=generator).tolist())

    segments = [Piece(ids(count), Segment(f"{seed}/{number}")) for number, count in enumerate(SEGMENT_TOKENS)]
    return [Piece(ids(HEAD_TOKENS), None), *segments, Piece(ids(TAIL_TOKENS), None)]


@dataclass(frozen=True)
class Seen:
    """What a prompt left: every linear layer's state ``[H, K, V]``, and the last token's logits ``[V]``."""

    states: Sequence[Tensor]
    logits: Tensor


class _Watching(Engine):
    """An engine that answers one request and notes what the last step left of its prompt."""

    seen: Seen | None = None

    def settle(self, work: Work, result: StepResult) -> list[Emission]:
        if len(result.logits):
            held = work.requests[-1].request.held
            assert held is not None, "a request that runs holds a state"
            states = [layer[held.state_slot].clone() for layer in self.runner.pool.states]
            self.seen = Seen(states, result.logits[-1].clone())
        return super().settle(work, result)


def _answer(runner: Runner, prompt: Sequence[Piece], policy: Policy) -> Seen:
    engine = _Watching(runner, Vocabulary(lambda ids: ""), 1, 4096, None)
    engine.add(Task("prompt", prompt, SamplingParams(max_tokens=1), policy))
    while engine.has_work:
        for emission in engine.step():
            if isinstance(emission.result, Exception):
                raise emission.result
    engine.store.clear()
    assert engine.seen is not None, "a prompt that was answered has logits"
    return engine.seen


def _errors(found: Seen, full: Seen) -> Errors:
    states = [relative(one, other) for one, other in zip(found.states, full.states, strict=True)]
    return Errors(states[0], states[-1], relative(found.logits, full.logits))


def relative(found: Tensor, expected: Tensor) -> float:
    """``|found - expected| / |expected|``; 0 where both are zero, as the states of models without a state are."""
    return 0.0 if torch.equal(found, expected) else float((found - expected).norm() / expected.norm())
