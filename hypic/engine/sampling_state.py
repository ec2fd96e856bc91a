"""What one request's tokens are chosen by: its values, the ids so far, and random numbers of its own, one a token.

Numbers are drawn on the CPU, so that what a request gets for a seed depends neither on its batch nor on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hypic.types import SamplingParams

# Below it the likeliest token has all the weight, and dividing by it would only overflow.
_GREEDY_BELOW = 1e-5
_NEUTRAL = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class SamplingState:
    """One request's sampling values, token ids so far and random numbers.

    ``params`` has every value resolved: the request's, else the checkpoint's ``defaults``, else neutral.
    ``seed`` is used when the request names none; without either the numbers differ in every run.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        *,
        defaults: Mapping[str, float] | None = None,
        seed: int | None = None,
    ) -> None:
        self.params = _resolved(params, defaults or {})
        self.prompt_ids = prompt_ids
        self.generated_ids: list[int] = []
        self._seed = self.params.seed if self.params.seed is not None else seed
        self._number, self._num_drawn = 0.0, 0
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        return value_of(self.params.temperature) < _GREEDY_BELOW

    @property
    def is_penalized(self) -> bool:
        """Whether ids that stand in the prompt or the answer are less likely for it."""
        params = self.params
        return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)

    @cached_property
    def is_plain(self) -> bool:
        """Whether its tokens are the likeliest of the logits as they are, and nothing else is asked for."""
        return self.is_greedy and not self.is_penalized and self.params.logprobs is None

    @cached_property
    def _generator(self) -> torch.Generator:
        """Made with the first number: greedy requests draw none."""
        made = torch.Generator()
        if self._seed is None:
            made.seed()
        else:
            made.manual_seed(self._seed)
        return made

    def uniform(self) -> float:
        """The random number in [0, 1) of the next token: the same one until that is appended, since a step that is
        broken off draws for a token that another step chooses."""
        while self._num_drawn <= len(self.generated_ids):
            self._number = float(torch.rand((), generator=self._generator, dtype=torch.float64))
            self._num_drawn += 1
        return self._number

    def append(self, token_id: int) -> None:
        """Take note of a generated token."""
        self.generated_ids.append(token_id)
        if self._seen is not None or self._counts is not None:
            self._note(token_id)

    @torch.inference_mode()
    def _note(self, token_id: int) -> None:
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def seen(self, vocab_size: int, device: torch.device) -> Tensor:
        """``[V]``, bool: which ids stand in the prompt or among the generated."""
        if self._seen is None:
            ids = on(device, [*self.prompt_ids, *self.generated_ids], torch.long)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device).index_fill_(0, ids, True)
        return self._seen

    def counts(self, vocab_size: int, device: torch.device) -> Tensor:
        """``[V]``, int64: how often each id was generated."""
        if self._counts is None:
            ids = on(device, self.generated_ids, torch.long)  # not bincount: it waits for the device
            counts = torch.zeros(vocab_size, dtype=torch.long, device=device)
            self._counts = counts.index_add_(0, ids, torch.ones_like(ids))
        return self._counts


def _resolved(params: SamplingParams, defaults: Mapping[str, float]) -> SamplingParams:
    open_values: dict[str, Any] = {
        name: defaults.get(name, neutral) for name, neutral in _NEUTRAL.items() if getattr(params, name) is None
    }
    return replace(params, **open_values) if open_values else params


def value_of(value: float | None) -> float:
    """A sampling value, which is set."""
    assert value is not None, "sampling values are resolved when a SamplingState is made"
    return value


def on(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Numbers of the host on a device, without waiting for what the device is at."""
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
