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
        self.sources: list[Slots | list[int]] = []
        self.outputs: list[Slots] = []
        self.token = self.packed = 0
        for chain in chains:
            self._walk(chain)

    def _stored(self, slot: int, count: int) -> list[int]:
        """The last ``count`` inputs kept in a slot; -1 marks the zero row."""
        if slot == ZERO_SLOT:
            return [-1] * count
        if slot in self.written:
            return self.written[slot][len(self.written[slot]) - count :] if count else []
        base = self.num_tokens + self.slots.setdefault(slot, len(self.slots)) * self.width
        return list(range(base + self.width - count, base + self.width))

    def _walk(self, chain: Chain) -> None:
        history = self._stored(chain.initial_slot, self.width)
        for link in chain.links:
            if isinstance(link, InteriorLink):
                history = self._last(history + self._stored(link.state_slot, min(self.width, link.num_tokens)))
                continue
            tokens = range(self.token, self.token + len(link.ids))
            self._row(history, tokens)
            recent = list(tokens[max(0, len(tokens) - self.width) :])
            history = self._last(history + recent)
            if link.fold is not None:
                done = self._stored(link.fold.state_slot, min(self.width, link.fold.num_done))
                self.writes[link.fold.state_slot] = self.written[link.fold.state_slot] = self._last(done + recent)
            if link.snapshot_slot is not None:
                self.writes[link.snapshot_slot] = history
        self.writes[chain.final_slot] = history

    def _last(self, history: list[int]) -> list[int]:
        return history[len(history) - min(self.width, len(history)) :]

    def _row(self, history: list[int], tokens: range) -> None:
        self.sources.append(history)
        self.sources.append(np.arange(tokens.start, tokens.stop))
        self.outputs.append(np.arange(self.packed, self.packed + len(tokens)))
        self.packed += self.width + len(tokens)
        self.token = tokens.stop

    def plan(self, to: To) -> ConvPlan:
        zero = self.num_tokens + len(self.slots) * self.width
        sources = np.concatenate([np.asarray(part, dtype=np.int64) for part in self.sources])
        writes = [[-1] * (self.width - len(tail)) + tail for tail in self.writes.values()]
        table = np.asarray(writes, dtype=np.int64).reshape(len(writes), self.width)
        return ConvPlan(
            tail_slots=to(list(self.slots)),
            sources=to(np.where(sources < 0, zero, sources)),
            outputs=to(np.concatenate(self.outputs)),
            write_slots=to(list(self.writes)),
            write_sources=to(np.where(table < 0, zero, table)),
        )
