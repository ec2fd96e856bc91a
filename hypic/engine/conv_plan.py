"""Which raw inputs precede every row of a step: the plan of its short convolutions, the same for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hypic.engine.chain import ZERO_SLOT, Chain, InteriorLink, To
from hypic.engine.segment import Slots


@dataclass(frozen=True)
class ConvPlan:
    """Short convolution over packed rows, each behind its history.

    Indices point into the table ``[tokens | tails of tail_slots, flattened | one zero row]``: ``sources`` lists every
    row's history and tokens, ``outputs [N]`` where the tokens' outputs stand in the valid convolution of that list, and
    ``write_sources [P, W-1]`` what becomes the tails of ``write_slots [P]``.
    """

    tail_slots: Tensor
    sources: Tensor
    outputs: Tensor
    write_slots: Tensor
    write_sources: Tensor


class Tails:
    """Follows, on the host, which raw inputs precede every row: indices into the table of ``ConvPlan``."""

    def __init__(self, chains: Sequence[Chain], conv_width: int, num_tokens: int) -> None:
        self.width, self.num_tokens = conv_width - 1, num_tokens
        self.slots: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self.writes: dict[int, list[int]] = {}
        self.histories: list[list[int]] = []
        self.lengths: list[int] = []
        self.token = 0
        for chain in chains:
            self._walk(chain)

    def packed(self, befores: Slots) -> tuple[Slots, Slots]:
        """Every row's history, of ``befores [rows, W-1]``, and its tokens, one row after the other; and where each
        token's window begins in that."""
        tokens, rows = np.arange(self.num_tokens), np.arange(len(self.lengths))
        outputs = tokens + np.repeat(rows * self.width, self.lengths)
        sources = np.empty(self.num_tokens + befores.size, dtype=np.int64)
        sources[outputs + self.width] = tokens
        firsts = np.cumsum(self.lengths) - self.lengths + rows * self.width
        sources[firsts[:, None] + np.arange(self.width)] = befores
        return sources, outputs

    def stored(self) -> tuple[Slots, Slots]:
        """What stands before every row, ``[rows, W-1]``, and what becomes of each written tail, ``[P, W-1]``; -1 marks
        the zero row."""
        width = self.width
        tails = [tail if len(tail) == width else [-1] * (width - len(tail)) + tail for tail in self.writes.values()]
        table = np.asarray(self.histories + tails, dtype=np.int64).reshape(-1, width) if width else None
        if table is None:
            table = np.empty((len(self.histories) + len(tails), 0), dtype=np.int64)
        return table[: len(self.histories)], table[len(self.histories) :]

    def _stored(self, slot: int, count: int) -> list[int]:
        """The last ``count`` inputs kept in a slot; -1 marks the zero row."""
        if slot == ZERO_SLOT:
            return [-1] * count
        if self.written and slot in self.written:
            return self.written[slot][len(self.written[slot]) - count :] if count else []
        base = self.num_tokens + self.slots.setdefault(slot, len(self.slots)) * self.width
        return list(range(base + self.width - count, base + self.width))

    def _walk(self, chain: Chain) -> None:
        history = self._stored(chain.initial_slot, self.width)
        for link in chain.links:
            if isinstance(link, InteriorLink):
                tail = self._stored(link.state_slot, min(self.width, link.num_tokens))
                history = tail if len(tail) == self.width else self._last(history + tail)
                continue
            self.histories.append(history)
            self.lengths.append(len(link.ids))
            self.token += len(link.ids)
            recent = list(range(self.token - min(self.width, len(link.ids)), self.token))
            history = recent if len(recent) == self.width else self._last(history + recent)
            if link.fold is not None:
                done = self._stored(link.fold.state_slot, min(self.width, link.fold.num_done))
                self.writes[link.fold.state_slot] = self.written[link.fold.state_slot] = self._last(done + recent)
            if link.snapshot_slot is not None:
                self.writes[link.snapshot_slot] = history
        self.writes[chain.final_slot] = history

    def _last(self, history: list[int]) -> list[int]:
        return history[len(history) - min(self.width, len(history)) :]

    def plan(self, to: To) -> ConvPlan:
        zero, (befores, tails) = self.num_tokens + len(self.slots) * self.width, self.stored()
        sources, outputs = self.packed(befores)
        return ConvPlan(
            tail_slots=to(list(self.slots)),
            sources=to(np.where(sources < 0, zero, sources)),
            outputs=to(outputs),
            write_slots=to(list(self.writes)),
            write_sources=to(np.where(tails < 0, zero, tails)),
        )
