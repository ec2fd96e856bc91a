"""``Plan``: which tokens ask which keys, as numbers on the device; ``plan_of`` makes one from numpy arrays.

Nothing in it is a shape: a plan of the same sizes can be copied over another, and a captured graph that reads the other
then does the new work. The host knows sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.integer[Any]]
Counts = NDArray[np.int32]

ALIGNED = 32
"""Numbers that a section's beginning is a multiple of: 128 bytes, what a load brings at once."""


class PlanError(ValueError):
    """Chains that do not fit together, or not into the sizes asked for."""


class PlanSizes(NamedTuple):
    """Room of a plan. What is not used stands there as padding, which costs next to nothing."""

    num_slots: int
    num_chains: int
    num_tokens: int
    num_tiles: int


class ChainQueries(NamedTuple):
    """One chain: token slots ``[n]`` of its keys in order of position, positions ``[q]`` of the tokens that ask.

    Tokens of a batch are numbered chain after chain. ``key_positions [n]`` are what keys turn by where that is not
    ``0..n-1``.
    """

    slots: Integers
    positions: Integers
    key_positions: Integers | None = None


@dataclass(frozen=True)
class Plan:
    """What ``attend`` does, in int32 on the device; every tensor is a section of ``buffer``.

    Keys of chain ``c`` lie at ``slots[starts[c] : starts[c] + lengths[c]]`` of the pool, in order of position; key
    ``j`` turns by ``key_positions[starts[c] + j]``, or by ``j`` where there are none. Tile ``m`` is the tokens
    ``tile_first[m]`` and ``tile_count[m] - 1`` after it, all of chain ``tile_chain[m]``; a token at ``positions[n]``
    sees the keys ``j <= positions[n]`` of its chain. A tile of count 0 is padding. No token may stand in two tiles.

    ``tile``: the most tokens of a tile. ``num_splits``: into how many parts the keys that a tile sees are split, each
    for a program of its own.
    """

    buffer: Tensor
    slots: Tensor
    key_positions: Tensor | None
    starts: Tensor
    lengths: Tensor
    positions: Tensor
    tile_chain: Tensor
    tile_first: Tensor
    tile_count: Tensor
    tile: int
    num_splits: int = 1

    @property
    def sizes(self) -> PlanSizes:
        return PlanSizes(len(self.slots), len(self.starts), len(self.positions), len(self.tile_count))

    def update(self, other: Plan) -> None:
        """Take over the contents of a plan of the same sizes, in one copy on the current stream.

        Raises:
            PlanError: sizes, tile or number of splits differ.
        """
        mine = (self.sizes, self.key_positions is None, self.tile, self.num_splits)
        theirs = (other.sizes, other.key_positions is None, other.tile, other.num_splits)
        if mine != theirs:
            raise PlanError(f"a plan of {theirs} cannot be copied over one of {mine}; plan it with the same sizes.")
        self.buffer.copy_(other.buffer, non_blocking=True)

    def with_splits(self, num_splits: int) -> Plan:
        """The same work with keys split into another number of parts."""
        return replace(self, num_splits=num_splits)

    def to(self, device: torch.device | str) -> Plan:
        """On another device."""
        sizes = self.sizes
        sections = _Sections.of(sizes, self.key_positions is not None)
        return _on_device(self.buffer.to(device, non_blocking=True), sections, self.tile, self.num_splits)


def plan_of(
    chains: Sequence[ChainQueries | tuple[Integers, Integers]],
    *,
    tile: int,
    num_splits: int = 1,
    sizes: PlanSizes | None = None,
    device: torch.device | str = "cpu",
) -> Plan:
    """A plan for ``chains``, padded to ``sizes`` where they are given.

    Tiles that see most keys come first, so that those that are left at the end are short. On a CUDA device the numbers
    go there in one copy from pinned memory, which is not waited for.

    Raises:
        PlanError: no chain, a tile of no tokens, or more of something than ``sizes`` has room for.
    """
    links = [ChainQueries(*chain) for chain in chains]
    if not links or tile < 1 or num_splits < 1:
        raise PlanError(f"{len(links)} chains in tiles of {tile} and {num_splits} splits; give one of each at least.")
    tiles = _tiles(links, tile)
    needed = PlanSizes(sum(len(c.slots) for c in links), len(links), sum(len(c.positions) for c in links), len(tiles))
    sizes = sizes or PlanSizes(*(max(1, number) for number in needed))
    if any(number > room for number, room in zip(needed, sizes, strict=True)):
        raise PlanError(f"chains of {needed} do not fit into {sizes}; ask for more room.")
    sections = _Sections.of(sizes, any(chain.key_positions is not None for chain in links))
    return _on_device(_filled(links, tiles, sections, torch.device(device)), sections, tile, num_splits)


class _Sections(NamedTuple):
    """Where each part of a plan lies in its buffer."""

    slots: slice
    starts: slice
    lengths: slice
    positions: slice
    tile_chain: slice
    tile_first: slice
    tile_count: slice
    key_positions: slice | None
    size: int

    @staticmethod
    def of(sizes: PlanSizes, has_key_positions: bool) -> _Sections:
        slots, chains, tokens, tiles = sizes
        lengths = np.array([slots, chains, chains, tokens, tiles, tiles, tiles, slots * has_key_positions])
        ends = np.cumsum(-(-lengths // ALIGNED) * ALIGNED)
        starts = np.concatenate([[0], ends[:-1]])
        parts = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        turns = parts.pop() if has_key_positions else None
        return _Sections._make([*parts[:7], turns, int(ends[-1])])


def _tiles(chains: Sequence[ChainQueries], tile: int) -> Counts:
    """Rows ``(chain, first token, number of tokens)``, those that see most keys first."""
    counts = np.array([len(chain.positions) for chain in chains])
    per_chain = -(-counts // tile)
    chain = np.repeat(np.arange(len(counts)), per_chain)
    number = np.arange(len(chain)) - np.repeat(np.cumsum(per_chain) - per_chain, per_chain)
    first = (np.cumsum(counts) - counts)[chain] + number * tile
    count = np.minimum(tile, counts[chain] - number * tile)
    positions = np.concatenate([np.asarray(c.positions) for c in chains])
    lengths = np.array([len(c.slots) for c in chains])
    seen = np.minimum(positions[first + count - 1] + 1, lengths[chain]) if len(chain) else chain
    order = np.argsort(-seen, kind="stable")
    return np.stack([chain, first, count], axis=1)[order].astype(np.int32)


def _filled(chains: Sequence[ChainQueries], tiles: Counts, sections: _Sections, device: torch.device) -> Tensor:
    staged = torch.empty(sections.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    buffer: Counts = staged.numpy()
    lengths = np.array([len(chain.slots) for chain in chains])
    _put(buffer, sections.slots, [chain.slots for chain in chains])
    _put(buffer, sections.starts, [np.cumsum(lengths) - lengths])
    _put(buffer, sections.lengths, [lengths])
    _put(buffer, sections.positions, [chain.positions for chain in chains])
    for column, section in enumerate((sections.tile_chain, sections.tile_first, sections.tile_count)):
        _put(buffer, section, [tiles[:, column]])
    if sections.key_positions is not None:
        turns = [np.arange(len(c.slots)) if c.key_positions is None else c.key_positions for c in chains]
        _put(buffer, sections.key_positions, turns)
    return staged.to(device, non_blocking=True)


def _put(buffer: Counts, section: slice, parts: Sequence[Integers]) -> None:
    """Parts one after the other, then zeros."""
    size = sum(map(len, parts))
    end = section.start + size
    np.concatenate(parts, out=buffer[section.start : end], casting="unsafe")
    buffer[end : section.stop] = 0


def _on_device(buffer: Tensor, sections: _Sections, tile: int, num_splits: int) -> Plan:
    return Plan(
        buffer=buffer,
        slots=buffer[sections.slots],
        key_positions=None if sections.key_positions is None else buffer[sections.key_positions],
        starts=buffer[sections.starts],
        lengths=buffer[sections.lengths],
        positions=buffer[sections.positions],
        tile_chain=buffer[sections.tile_chain],
        tile_first=buffer[sections.tile_first],
        tile_count=buffer[sections.tile_count],
        tile=tile,
        num_splits=num_splits,
    )
