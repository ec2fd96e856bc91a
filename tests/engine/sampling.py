"""Logits and states of sampling as tests draw them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypic import SamplingParams
from hypic.engine.sampler import filter_scores
from hypic.engine.sampling_state import SamplingState

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
