"""Every filter against transformers' own, draws against their distribution, seeds against the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from hypic import SamplingParams
from hypic.engine.sampler import Sampler, filter_scores, penalize
from hypic.engine.sampling_state import SamplingState
from hypic.types import TokenLogprob

VOCAB = 50


def logits_of(num_rows: int = 3, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64).to(dtype)


def state(seed: int | None = 0, prompt_ids: tuple[int, ...] = (), **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(seed=seed, **params), prompt_ids)


def filtered(logits: Tensor, **params: Any) -> Tensor:
    return filter_scores(logits, [state(**{"temperature": 1.0, **params}).params] * len(logits))


def same_scores(ours: Tensor, theirs: Tensor, atol: float = 1e-5) -> bool:
    """Equal up to the constant that filters leave free, with the same ids left out."""
    ours, theirs = ours - ours.amax(-1, keepdim=True), theirs - theirs.amax(-1, keepdim=True)
    return torch.equal(ours.isinf(), theirs.isinf()) and torch.allclose(ours, theirs, atol=atol)


# Values, transformers' filters for them, and slightly other values that the comparison must tell from them.
WARPERS: list[tuple[dict[str, Any], list[Any], dict[str, Any]]] = [
    ({"temperature": 0.3}, [hf.TemperatureLogitsWarper(0.3)], {"temperature": 0.301}),
    ({"temperature": 2.5}, [hf.TemperatureLogitsWarper(2.5)], {"temperature": 2.51}),
    ({"top_k": 1}, [hf.TopKLogitsWarper(1)], {"top_k": 2}),
    ({"top_k": 7}, [hf.TopKLogitsWarper(7)], {"top_k": 8}),
    ({"top_k": 500}, [hf.TopKLogitsWarper(500)], {"top_k": 49}),
    ({"top_p": 0.01}, [hf.TopPLogitsWarper(0.01)], {"top_p": 0.6}),
    ({"top_p": 0.9}, [hf.TopPLogitsWarper(0.9)], {"top_p": 0.89}),
    ({"top_p": 0.999}, [hf.TopPLogitsWarper(0.999)], {"top_p": 1.0}),
    ({"min_p": 0.05}, [hf.MinPLogitsWarper(0.05)], {"min_p": 0.06}),
    ({"min_p": 1.0}, [hf.MinPLogitsWarper(1.0)], {"min_p": 0.8}),
    (
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
        [
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(20),
            hf.TopPLogitsWarper(0.8),
            hf.MinPLogitsWarper(0.02),
        ],
        {"top_p": 0.85},
    ),
]


@pytest.mark.parametrize(("params", "warpers", "off"), WARPERS, ids=[str(params) for params, *_ in WARPERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_are_those_of_transformers(
    params: dict[str, Any], warpers: list[Any], off: dict[str, Any], dtype: torch.dtype
) -> None:
    logits = logits_of(20, dtype)
    theirs = logits
    for warper in warpers:
        theirs = warper(None, theirs)
    ours = filtered(logits, **params)
    assert ours.dtype == dtype
    assert same_scores(ours, theirs)
    assert not same_scores(filtered(logits, **{**params, **off}), theirs)


def test_the_order_of_filters_matters() -> None:
    """Bites: top-p before top-k keeps other ids than top-k before top-p."""
    logits = logits_of(20)
    right = filtered(logits, top_k=5, top_p=0.7)
    swapped = filtered(filtered(logits, top_p=0.7), top_k=5)
    assert not same_scores(right, swapped)


def test_ids_that_tie_with_the_last_one_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert filtered(logits, top_k=2).isfinite().tolist() == [[True, True, True, True, False]]
    assert filtered(logits, top_p=0.5).isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_ids_that_are_left_need_not_be_counted_where_top_k_limits_every_row(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many that tie, the same stay beside a row without ``top_k``, for which they are counted."""
    logits = (logits_of(16) * 2).round()
    counted = filter_scores(
        torch.cat([logits, logits[:1]]),
        [state(temperature=0.8, top_p=top_p, top_k=k).params for k in [*range(2, 18), 0]],
    )

    def never(*args: Any) -> Any:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(torch.Tensor, "__int__", never)
    found = filter_scores(logits, [state(temperature=0.8, top_p=top_p, top_k=k).params for k in range(2, 18)])
    assert torch.equal(found, counted[:-1]) and found.isfinite().sum() > 16
    with pytest.raises(AssertionError, match="was asked"):
        filter_scores(logits, [state(temperature=0.8, top_p=top_p).params] * 16)


def test_rows_have_their_own_filters() -> None:
    logits = logits_of(4)
    wanted: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}]
    states = [state(temperature=1.0, **params) for params in wanted]
    together = filter_scores(logits, [s.params for s in states])
    for row, params in enumerate(wanted):
        assert torch.equal(together[row : row + 1], filtered(logits[row : row + 1], **params))


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_of(2)
    prompt, generated = [3, 4, 4, 9], [11, 3]
    ours = state(prompt_ids=tuple(prompt), repetition_penalty=1.3)
    for token_id in generated:
        ours.append(token_id)
    scores = penalize(logits, [ours, state()])
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + generated]), logits[:1].clone())
    assert torch.allclose(scores[:1], theirs)
    assert torch.equal(scores[1], logits[1]) and not torch.equal(scores[0], logits[0])
    # A token that comes later is penalised too.
    ours.append(20)
    again = penalize(logits, [ours, state()])
    assert again[0, 20] != logits[0, 20] and torch.equal(logits, logits_of(2))


def test_presence_and_frequency_count_what_was_generated() -> None:
    logits = logits_of(1)
    ours = state(prompt_ids=(7,), presence_penalty=0.5, frequency_penalty=0.25)
    for token_id in (3, 5, 3):
        ours.append(token_id)
        scores = penalize(logits, [ours])
    expected = logits.clone()
    expected[0, 3] -= 0.5 + 2 * 0.25
    expected[0, 5] -= 0.5 + 0.25
    assert torch.allclose(scores, expected)


def test_penalties_change_what_is_chosen() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 2] = 1.0, 0.9
    ours = state(presence_penalty=0.2)
    assert [Sampler().sample(logits, [ours])[0].token_id for _ in range(3)] == [1, 2, 1]
    assert ours.generated_ids == [1, 2, 1]


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
