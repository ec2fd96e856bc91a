"""What a step runs, in prompt order: links of chains, as the scheduler describes them; no tensor yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hypic.engine.segment import Slots

ZERO_SLOT = 0


@dataclass(frozen=True)
class FoldInto:
    """The interior this row belongs to: where its map and tail go, and how many of its tokens are folded already."""

    state_slot: int
    transition_slot: int
    num_done: int


@dataclass(frozen=True)
class RowLink:
    """Adjacent tokens to run: ``ids [n]`` at ``position``, K/V to ``kv_slots [n]``.

    ``snapshot_slot`` receives the state after this row; ``fold`` marks a row of an interior being encoded.
    """

    ids: Sequence[int]
    position: int
    kv_slots: Slots
    snapshot_slot: int | None = None
    fold: FoldInto | None = None


@dataclass(frozen=True)
class InteriorLink:
    """A cached interior of ``num_tokens``, of a segment that begins at prompt position ``origin``."""

    state_slot: int
    transition_slot: int
    num_tokens: int
    origin: int


@dataclass(frozen=True)
class Chain:
    """The links of one request (or of one segment being encoded) that run in this step.

    ``context [n]`` are the token slots of positions ``0..n-1`` up to the last row's end. ``key_positions`` differs
    from ``0..n-1`` only in the ablation without rotation. ``initial_slot`` is the state so far (0: nothing).
    ``table_row`` is the request's row in the device's table of token slots.
    """

    links: Sequence[RowLink | InteriorLink]
    context: Slots
    initial_slot: int
    final_slot: int
    wants_logits: bool = False
    key_positions: Slots | None = None
    compose: str = "transition"
    table_row: int | None = None

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(link.ids) for link in self.links if isinstance(link, RowLink))


@dataclass(frozen=True)
class To:
    """Whole numbers from the host to a device."""

    device: torch.device

    def __call__(self, values: Sequence[int] | Slots) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device, non_blocking=True)
