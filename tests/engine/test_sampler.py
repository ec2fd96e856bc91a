"""Draws against their distribution, seeds against the batch, and rows that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic import SamplingParams
from hypic.engine.sampler import Sampler
from hypic.engine.sampling_state import SamplingState
from hypic.types import TokenLogprob
from tests.engine.sampling import VOCAB, filtered, logits_of, state


def test_greedy_takes_the_likeliest_and_ignores_filters() -> None:
    logits = logits_of(3)
    states = [state(), state(temperature=0.0, top_k=3), state(temperature=1e-9)]
    tokens = Sampler().sample(logits, states)
    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()
    assert all(t.finite and t.logprob is None for t in tokens)


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 6},
    {"temperature": 1.5, "top_p": 0.8},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    num_draws = 4000
    logits = logits_of(1, seed=3) / 2
    ours = state(seed=5, **params)
    counts = torch.zeros(VOCAB)
    for _ in range(num_draws):
        counts[Sampler().sample(logits, [ours])[0].token_id] += 1
    expected = num_draws * filtered(logits, **params).softmax(-1)[0]
    assert deviation(counts, expected) < 3.5
    # Bites: the same draws do not fit a slightly warmer distribution.
    warmer = num_draws * filtered(logits, **{**params, "temperature": 1.3 * params["temperature"]}).softmax(-1)[0]
    assert deviation(counts, warmer) > 5


def deviation(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations chi squared lies above its mean; infinite where what cannot be was drawn."""
    if counts[expected == 0].any():
        return math.inf
    likely = expected > 5
    chi2 = ((counts - expected)[likely].square() / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    return float((chi2 - freedom) / math.sqrt(2 * freedom))


def drawn(batch: list[SamplingState], row: int, num_tokens: int = 12) -> list[int]:
    """What ``batch[row]`` gets from logits of its own, among neighbours with others."""
    for step in range(num_tokens):
        logits = logits_of(len(batch), seed=1000 + step)
        logits[row] = logits_of(1, seed=step)[0]
        Sampler().sample(logits, batch)
    return batch[row].generated_ids


def test_a_seed_gives_the_same_in_any_batch() -> None:
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
    alone = drawn([state(7, **params)], 0)
    neighbours: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 5}, {"min_p": 0.1}]
    for at in range(4):
        batch = [state(n, **p) for n, p in enumerate(neighbours)]
        batch.insert(at, state(7, **params))
        assert drawn(batch, at) == alone
    # Bites: another seed, and no seed, give something else.
    assert drawn([state(8, **params)], 0) != alone
    assert drawn([state(None, **params)], 0) != drawn([state(None, **params)], 0)


def test_the_engines_seed_is_used_when_the_request_has_none() -> None:
    def with_seed(own: int | None, engines: int) -> list[int]:
        return drawn([SamplingState(SamplingParams(temperature=1.0, seed=own), seed=engines)], 0)

    assert with_seed(None, 3) == with_seed(3, 4) != with_seed(None, 4)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_an_id_without_weight_is_never_drawn(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingState, "uniform", lambda self: uniform)
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 10:20] = torch.linspace(-1, 1, 10)
    assert 10 <= Sampler().sample(logits, [state(temperature=1.0)])[0].token_id < 20
    assert Sampler().sample(logits, [state(temperature=1.0, top_k=1)])[0].token_id == 19


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(3)
    states = [
        state(temperature=0.5, top_k=2, repetition_penalty=2.0, prompt_ids=(1, 2, 3), logprobs=4),
        state(),
        state(logprobs=0),
    ]
    tokens = Sampler().sample(logits, states)
    expected = logits.log_softmax(-1)
    best = expected[0].topk(4)
    assert tokens[0].logprob is not None
    assert tokens[0].logprob.token_id == tokens[0].token_id
    assert tokens[0].logprob.logprob == pytest.approx(float(expected[0, tokens[0].token_id]))
    assert [i for i, _ in tokens[0].logprob.top] == best.indices.tolist()
    assert [x for _, x in tokens[0].logprob.top] == pytest.approx(best.values.tolist())
    assert tokens[1].logprob is None
    assert tokens[2].logprob == TokenLogprob(tokens[2].token_id, float(expected[2].max()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_changes_nobody_else(bad: float | str, temperature: float) -> None:
    def sample(spoilt: bool) -> list[Any]:
        logits = logits_of(3)
        if spoilt:
            logits[1] = -torch.inf
            if isinstance(bad, float):
                logits[1, 4] = bad
        states = [state(n, temperature=temperature, top_p=0.9, logprobs=1) for n in range(3)]
        tokens = Sampler().sample(logits, states)
        assert [len(s.generated_ids) for s in states] == [1, 0 if spoilt else 1, 1]
        return tokens

    good, spoilt = sample(False), sample(True)
    assert good[0] == spoilt[0] and good[2] == spoilt[2]
    assert good[1].finite and not spoilt[1].finite and spoilt[1].token_id == -1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_p": 0.5, "top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 2.0},
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_a_broken_row_gives_is_an_id_that_there_is(bad: float, params: Mapping[str, Any], device: str) -> None:
    """The next step may be under way with it before the host has seen that the row is broken; an id that is none would
    be read out of bounds there."""
    logits = logits_of(4).to(device)
    logits[0], logits[1, 3], logits[2, 1:] = bad, bad, bad
    chosen, *_ = Sampler().choose(logits, [state(seed, (3,), **params) for seed in range(4)]).tensors
    assert all(0 <= id < VOCAB for id in chosen.tolist())


def test_a_row_of_only_nan_with_top_p_alone_in_its_batch() -> None:
    logits = torch.full((1, VOCAB), math.nan)
    assert not Sampler().sample(logits, [state(temperature=1.0, top_p=0.5)])[0].finite


@pytest.mark.parametrize(
    ("params", "defaults", "expected"),
    [
        ({}, {}, (0.0, 1.0, 0, 0.0, 1.0)),
        ({}, {"temperature": 0.7, "top_k": 20, "max_new_tokens": 9}, (0.7, 1.0, 20, 0.0, 1.0)),
        ({"temperature": 0.0, "top_k": 0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, (0.0, 0.8, 0, 0.0, 1.0)),
    ],
)
def test_values_come_from_the_request_then_the_checkpoint(
    params: Mapping[str, Any], defaults: Mapping[str, float], expected: tuple[float, ...]
) -> None:
    p = SamplingState(SamplingParams(**params), defaults=defaults).params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == expected


def test_bf16_logits_are_sampled_in_fp32() -> None:
    logits = logits_of(2).bfloat16()
    params = {"temperature": 1.0, "top_p": 0.9}
    in_bf16 = Sampler().sample(logits, [state(1, **params), state(2, **params)])
    assert in_bf16 == Sampler().sample(logits.float(), [state(1, **params), state(2, **params)])


@pytest.mark.gpu
def test_a_seed_gives_the_same_on_a_gpu() -> None:
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.2, "prompt_ids": (1, 2)}
    logits = logits_of(2, torch.float64)
    on_cpu, on_gpu = state(3, **params), state(3, **params)
    for _ in range(20):
        Sampler().sample(logits[:1], [on_cpu])
        Sampler().sample(logits[:1].cuda(), [on_gpu])
    assert on_cpu.generated_ids == on_gpu.generated_ids
