"""The plan of short convolutions as the kernel counts (``hypic_kernels.conv``), for a step in one pass over its links.

A tail is two numbers, ``(first, step)``: its inputs are ``first + step * n``, tokens of the step upwards, or a slot's
downwards. A link that is shorter than the window shows what came before it, which two numbers cannot say: such steps
are walked token by token (``conv_plan``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hypic.engine.chain import ZERO_SLOT, Chain, InteriorLink, RowLink
from hypic.engine.conv_plan import Tails
from hypic.engine.segment import Slots
from hypic_kernels.conv import NOTHING

Ints = NDArray[np.int32]
Run = tuple[int, int]


def conv_arrays(chains: Sequence[Chain], conv_width: int, num_tokens: int) -> dict[str, Ints | Slots]:
    """Every token's inputs, oldest first ``[N, W]``, and what becomes the tails of which slots ``[P, W-1]``."""
    walked = _Walk(conv_width - 1)
    if conv_width > 1 and all(walked.takes(chain) for chain in chains):
        return walked.arrays(num_tokens)
    return _token_by_token(Tails(chains, conv_width, num_tokens), num_tokens)


@dataclass
class _Walk:
    width: int
    token: int = 0
    histories: list[Run] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    written: dict[int, Run] = field(default_factory=dict)
    writes: dict[int, Run] = field(default_factory=dict)

    def takes(self, chain: Chain) -> bool:
        """Goes through a chain's links; false, and of no further use, if one is too short."""
        history = self._stored(chain.initial_slot)
        for link in chain.links:
            if isinstance(link, InteriorLink):
                history, num_tokens = self._stored(link.state_slot), link.num_tokens
            else:
                num_tokens = len(link.ids)
                history = self._row(link, history, num_tokens)
            if num_tokens < self.width:
                return False
        self.writes[chain.final_slot] = history
        return True

    def _row(self, link: RowLink, history: Run, num_tokens: int) -> Run:
        self.histories.append(history)
        self.starts.append(self.token)
        self.token += num_tokens
        history = self.token - self.width, 1
        if link.fold is not None:
            self.writes[link.fold.state_slot] = self.written[link.fold.state_slot] = history
        if link.snapshot_slot is not None:
            self.writes[link.snapshot_slot] = history
        return history

    def _stored(self, slot: int) -> Run:
        if slot == ZERO_SLOT:
            return NOTHING, 0
        return self.written[slot] if slot in self.written else (-1 - slot * self.width, -1)

    def arrays(self, num_tokens: int) -> dict[str, Ints | Slots]:
        width, (near, own) = self.width, _windows(self.width)
        tokens, starts = np.arange(num_tokens, dtype=np.int32), np.asarray(self.starts, dtype=np.int32)
        sources = np.add.outer(tokens, np.arange(-width, 1, dtype=np.int32))
        befores = np.concatenate(
            [_listed(self.histories, width), starts[:, None] + np.arange(width, dtype=np.int32)], 1
        )
        sources[starts[:, None] + own] = befores[:, near]
        return {
            "conv_sources": sources,
            "conv_write_slots": np.asarray(list(self.writes), dtype=np.int32),
            "conv_write_sources": _listed(list(self.writes.values()), width),
        }


@lru_cache(maxsize=8)
def _windows(width: int) -> tuple[Slots, Slots]:
    """Of a row's first ``width`` tokens: where their windows stand in ``[history | these tokens]``, and these."""
    own = np.arange(width)
    return own[:, None] + np.arange(width + 1), own


def _listed(runs: Sequence[Run], width: int) -> Ints:
    pairs: Ints = np.asarray(runs, dtype=np.int32).reshape(-1, 2)
    firsts, steps = pairs[:, :1], np.multiply.outer(pairs[:, 1], np.arange(width, dtype=np.int32))
    return np.add(firsts, steps)


def _token_by_token(tails: Tails, num_tokens: int) -> dict[str, Ints | Slots]:
    """The same where links are short."""
    width, slots = tails.width, np.asarray([*tails.slots, 0])

    def counted(table: Slots) -> Slots:
        slot, offset = np.divmod(np.maximum(table - num_tokens, 0), max(width, 1))
        old = -1 - (slots[slot] * width + offset)
        return np.where(table < 0, NOTHING, np.where(table < num_tokens, table, old))

    befores, writes = tails.stored()
    packed, outputs = tails.packed(counted(befores))
    return {
        "conv_sources": packed[outputs[:, None] + np.arange(width + 1)],
        "conv_write_slots": np.asarray(list(tails.writes)),
        "conv_write_sources": counted(writes),
    }
