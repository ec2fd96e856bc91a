"""Every filter and penalty against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from hypic.engine.sampler import Sampler, filter_scores, penalize
from tests.engine.sampling import VOCAB, filtered, logits_of, same_scores, state

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
