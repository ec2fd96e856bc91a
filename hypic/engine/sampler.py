"""Logits to tokens: penalties, temperature, top-k, top-p, min-p, in transformers' order.

Every request owns its random numbers, one uniform number a token, drawn on the CPU: what it gets for a
seed depends neither on the batch it runs in nor on the device. All arithmetic is in fp32, or in
fp64 when the logits are. Not here: stop strings (``detokenizer``) and end-of-text ids (``engine``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hypic.engine.read_back import ReadBack
from hypic.engine.sampling_state import SamplingState, on, value_of
from hypic.types import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. ``finite`` is false when the row held NaN or infinity, or nothing but ``-inf``: then no
    token was chosen, and ``token_id`` is -1."""

    token_id: int
    logprob: TokenLogprob | None = None
    finite: bool = True


@dataclass(frozen=True)
class Choice:
    """Tokens that are chosen on the device and not read yet: ``tensors`` are what the host must read of it, the chosen
    ids ``[R]``, whether each row is finite ``[R]``, and of the rows that want them log probabilities: the chosen
    ids' ``[L]``, the likeliest ids' ``[L, n]`` and these ids. Rows behind those of ``states`` are nobody's."""

    states: Sequence[SamplingState] = ()
    tensors: tuple[Tensor, ...] = ()

    def tokens(self, read: Sequence[Tensor]) -> list[SampledToken]:
        """The tokens, given ``tensors`` on the host; each is appended to its row's state."""
        if not self.states:
            return []
        chosen, finite, logprobs = read[0].tolist(), read[1].tolist(), self._logprobs(read)
        return [
            self._settle(state, chosen[row], logprobs.get(row)) if finite[row] else SampledToken(-1, finite=False)
            for row, state in enumerate(self.states)
        ]

    def _logprobs(self, read: Sequence[Tensor]) -> Mapping[int, TokenLogprob]:
        if len(read) == 2:
            return {}
        wanted, chosen = wanted_logprobs(self.states), read[0].tolist()
        own, values, ids = (tensor.tolist() for tensor in read[2:])
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        return {
            row: TokenLogprob(chosen[row], logprob, top[:count])
            for (row, count), logprob, top in zip(wanted.items(), own, tops, strict=True)
        }

    @staticmethod
    def _settle(state: SamplingState, token_id: int, logprob: TokenLogprob | None) -> SampledToken:
        state.append(token_id)
        return SampledToken(token_id, logprob)


def wanted_logprobs(states: Sequence[SamplingState]) -> dict[int, int]:
    """How many of the likeliest are asked for, by row."""
    return {row: state.params.logprobs for row, state in enumerate(states) if state.params.logprobs is not None}


class Likeliest(NamedTuple):
    """Of rows of logits, the likeliest ids ``[R]`` and whether each is finite ``[R]``."""

    ids: Tensor
    finite: Tensor


def likeliest(logits: Tensor) -> Likeliest:
    """Of ``logits [R, V]``, in whichever type: the likeliest is the same in any."""
    ids = logits.argmax(-1)
    return Likeliest(ids, logits.gather(-1, ids[:, None])[:, 0].isfinite())


class Sampler:
    """Chooses one token for every row of a step."""

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """One token for each row of ``logits`` ``[R, V]``; it is appended to the row's state.

        Log probabilities are the model's own: before penalties, temperature and filters.
        """
        choice = self.choose(logits, states)
        return choice.tokens(ReadBack(choice.tensors).wait())

    @torch.inference_mode()
    def choose(self, logits: Tensor, states: Sequence[SamplingState], known: Likeliest | None = None) -> Choice:
        """The same, left on the device: the host waits for nothing, unless a row has a ``top_p`` and another, or
        itself, no ``top_k`` (then the filter asks how many ids are left). What is ``known`` of the logits, and perhaps
        of rows behind them, is not computed."""
        if all(state.is_plain for state in states):
            return Choice(states, likeliest(logits) if known is None else known)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        chosen = self._chosen(penalize(logits, states), states)
        return Choice(states, (chosen, logits.amax(-1).isfinite(), *self._logprobs(logits, chosen, states)))

    def _chosen(self, scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
        drawn = [row for row, state in enumerate(states) if not state.is_greedy]
        if not drawn:
            return scores.argmax(-1)
        if len(drawn) == len(states):
            return self._draw(scores, states)
        rows = on(scores.device, drawn, torch.long)
        return scores.argmax(-1).index_copy_(0, rows, self._draw(scores[rows], [states[row] for row in drawn]))

    def _draw(self, scores: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """``[R]``: ids by inverting the cumulative distribution, in fp64, at each state's next random number."""
        weights = filter_scores(scores, [state.params for state in states]).softmax(-1).double()
        cumulative = weights.cumsum(-1)
        at = on(scores.device, [[state.uniform()] for state in states], torch.float64)
        drawn = torch.searchsorted(cumulative, at * cumulative[:, -1:], right=True)
        # A product rounded up to the whole sum would land behind the last id that has any weight.
        last = cumulative.argmax(-1, keepdim=True)
        return torch.minimum(drawn, last).squeeze(-1)

    def _logprobs(self, logits: Tensor, chosen: Tensor, states: Sequence[SamplingState]) -> tuple[Tensor, ...]:
        wanted = wanted_logprobs(states)
        if not wanted:
            return ()
        rows = on(logits.device, list(wanted), torch.long)
        logprobs = logits[rows].log_softmax(-1)
        own = logprobs.gather(-1, chosen[rows].unsqueeze(-1)).squeeze(-1)
        values, ids = logprobs.topk(min(max(wanted.values()), logits.shape[-1]), dim=-1)
        return own, values, ids


def penalize(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Scores ``[R, V]`` after repetition (prompt and generated), presence and frequency (generated) penalties.

    Repetition divides a positive score and multiplies a negative one; presence is taken off once for an
    id that was generated, frequency once for every time.
    """
    scores = logits
    for row, state in enumerate(states):
        if not state.is_penalized:
            continue
        repetition = value_of(state.params.repetition_penalty)
        presence, frequency = state.params.presence_penalty, state.params.frequency_penalty
        scores = logits.clone() if scores is logits else scores
        values, size = scores[row], (logits.shape[-1], logits.device)
        if repetition != 1.0:
            penalized = torch.where(values < 0, values * repetition, values / repetition)
            values.copy_(torch.where(state.seen(*size), penalized, values))
        if presence or frequency:
            counts = state.counts(*size)
            values -= presence * (counts > 0) + frequency * counts
    return scores


def filter_scores(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores ``[R, V]`` over temperature, with ``-inf`` for ids that top-k, top-p and min-p leave out, in this order.

    ``top_p`` keeps the fewest likeliest ids whose weights add up to it, ``min_p`` those of at least this share
    of the likeliest one's weight. Ids that tie with the last one kept stay, so that no order among them matters.
    """
    values = [[value_of(p.temperature), value_of(p.top_p), value_of(p.min_p)] for p in params]
    columns = on(scores.device, values, torch.float64)
    temperature, top_p, min_p = columns[:, 0:1], columns[:, 1:2], columns[:, 2:3]
    # The likeliest at zero: no temperature is small enough to overflow.
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.to(scores.dtype)
    sizes = [k if 0 < k < scores.shape[-1] else scores.shape[-1] for k in (int(value_of(p.top_k)) for p in params)]
    scores = _top_k(scores, sizes)
    if any(value_of(p.top_p) < 1.0 for p in params):
        scores = _top_p(scores, top_p, max(sizes))
    return scores.masked_fill(scores < min_p.log(), -torch.inf)


def _top_k(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    vocab_size = scores.shape[-1]
    limited = [k for k in sizes if k < vocab_size]
    if not limited:
        return scores
    values = scores.topk(max(limited), dim=-1).values
    at = on(scores.device, [[min(k, max(limited)) - 1] for k in sizes], torch.long)
    unlimited = on(scores.device, [[k == vocab_size] for k in sizes], torch.bool)
    lowest = values.gather(-1, at).masked_fill(unlimited, -torch.inf)
    return scores.masked_fill(scores < lowest, -torch.inf)


def _top_p(scores: Tensor, top_p: Tensor, most: int) -> Tensor:
    # After top-k few ids are left, and only they need sorting. Where every row is limited they are the ``most``
    # likeliest and what ties with the last of these, which stays or goes with it: nobody need ask the device.
    num_left = most if most < scores.shape[-1] else max(1, int((scores > -torch.inf).sum(-1).max()))
    ordered, ids = scores.topk(num_left, dim=-1)
    # Weights over the whole row, whose width does not depend on the other rows.
    weights = scores.double().softmax(-1).gather(-1, ids)
    before = weights.cumsum(-1) - weights
    # A top_p of 1 must leave a row alone even where rounding lets the sum reach 1 early.
    dropped = (before >= top_p) & (top_p < 1.0)
    dropped[:, 0] = False
    lowest = ordered.masked_fill(dropped, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill(scores < lowest, -torch.inf)
