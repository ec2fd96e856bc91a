"""A sampler that takes note of log probabilities, says what it is told to, and holds one request's next-token
distributions against another's, all on the device: the host reads one number a token, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hypic.engine.sampler import Choice, Likeliest, Sampler
from hypic.engine.sampling_state import SamplingState


@dataclass
class Noted:
    """What is noted of a request.

    ``told`` are the tokens it has to say; ``keeps`` keeps its log probabilities, ``rows``; ``against`` are the tokens
    that a divergence belongs to, whose log probabilities stand in the table from row ``start`` on. Where a request
    goes on by itself, its ``divergences`` end behind the first token that differs.
    """

    told: Sequence[int] | None = None
    keeps: bool = False
    against: Sequence[int] = ()
    start: int = 0
    rows: list[Tensor] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    is_apart: bool = False

    def note(self, place: int, divergence: float) -> None:
        """Of the answer's token ``place``; a step that was broken off behind its choice has noted it before."""
        self.divergences[place:] = [divergence]

    def keep(self, place: int, logprobs: Tensor) -> None:
        """Log probabilities ``[V]`` for the answer's token ``place``, likewise."""
        self.rows[place:] = [logprobs]

    def row_of(self, said: Sequence[int]) -> int:
        """The row of the table for the token behind those ``said``; -1 for none."""
        place = len(said)
        if self.is_apart or place >= len(self.against):
            return -1
        self.is_apart = place > 0 and said[-1] != self.against[place - 1]
        return -1 if self.is_apart else self.start + place


class Noting(Sampler):
    """See the module's docstring. ``asked`` names the request of each row, ``noted`` what is noted of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.noted: dict[str, Noted] = {}
        self.table: Tensor | None = None
        self._compared: list[tuple[list[tuple[Noted, int] | None], Tensor]] = []

    def begin(self, table: Tensor | None) -> None:
        """Forgets all that was noted; ``table [n, V]`` are log probabilities to compare with."""
        self.table = table
        self.noted.clear()
        self._compared.clear()

    def finish(self) -> None:
        """Reads the divergences, all at once."""
        if not self._compared:
            return
        values = iter(torch.cat([found for _, found in self._compared]).tolist())
        for owners in (owners for owners, _ in self._compared):
            for owner, value in zip(owners, values, strict=False):
                if owner is not None:
                    owner[0].note(owner[1], value)
        self._compared.clear()

    @torch.inference_mode()
    def choose(self, logits: Tensor, states: Sequence[SamplingState], known: Likeliest | None = None) -> Choice:
        """As ``Sampler``."""
        noted = [self.noted[id] for id in self.asked]
        rows = [one.row_of(state.generated_ids) for one, state in zip(noted, states, strict=True)]
        if any(one.keeps for one in noted) or max(rows) >= 0:
            places = [len(state.generated_ids) for state in states]
            self._note(noted, places, rows, logits.float().log_softmax(-1))
        told = [-1 if n.told is None else n.told[len(s.generated_ids)] for n, s in zip(noted, states, strict=True)]
        if max(told) < 0:
            return super().choose(logits, states, known)
        choice = super().choose(logits, states)
        chosen, finite, *others = choice.tensors
        ids = _sent(told, logits.device)
        return Choice(states, (torch.where(ids < 0, chosen, ids), finite | (ids >= 0), *others))

    def _note(self, noted: Sequence[Noted], places: Sequence[int], rows: Sequence[int], logprobs: Tensor) -> None:
        if any(one.keeps for one in noted):
            for one, place, row in zip(noted, places, logprobs, strict=True):
                if one.keeps:
                    one.keep(place, row)
        if max(rows) >= 0:
            assert self.table is not None, "what is compared is compared with a table"
            expected = self.table[_sent(rows, logprobs.device).clamp_min(0)]
            each = zip(noted, places, rows, strict=True)
            owners = [(one, place) if row >= 0 else None for one, place, row in each]
            self._compared.append((owners, divergences(expected, logprobs)))


def divergences(full: Tensor, other: Tensor) -> Tensor:
    """``[n]``: ``KL(full || other)`` of log probabilities ``[n, V]``, in nats; rounding makes none of them negative."""
    return (full.exp() * (full - other)).nan_to_num(0.0).sum(-1).clamp_min(0.0)


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the host on a device, without waiting for what the device is at."""
    made = torch.tensor(numbers)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
