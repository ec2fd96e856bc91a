"""``Plan``: which tokens ask which keys, as numbers on the device; ``plan_of`` makes one from numpy arrays.

Nothing in it is a shape: a plan of the same sizes can be copied over another, and a captured graph that reads the other
then does the new work. The host knows sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypic_kernels.attention.parts import NO_TILE, UNIT, Parts, most_parts, shared_out

Integers = NDArray[np.integer[Any]]
Counts = NDArray[np.int32]

ALIGNED = 32
"""Numbers that a section's beginning is a multiple of: 128 bytes, what a load brings at once."""


class PlanError(ValueError):
    """Chains that do not fit together, or not into the sizes asked for."""


class PlanSizes(NamedTuple):
    """Room of a plan. What is not used stands there as padding, which costs next to nothing. 0 parts: as many as the
    tiles can have."""

    num_slots: int
    num_chains: int
    num_tokens: int
    num_tiles: int
    num_parts: int = 0


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

    The keys that a tile sees are shared out over programs: part ``p`` is the keys ``part_begin[p]`` to ``part_end[p]``
    of tile ``part_tile[p]``, or padding where that is negative; tile ``m`` has the ``tile_parts[m]`` parts from
    ``tile_part[m]`` on. ``is_split``: a tile may have more than one.

    ``tile``: the most tokens of a tile. ``num_keys``: the most keys of all chains together, by default as many as there
    are slots. ``turns_once``: enough tiles read a chain for its keys to be turned before they are asked.
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
    tile_part: Tensor
    tile_parts: Tensor
    part_tile: Tensor
    part_begin: Tensor
    part_end: Tensor
    tile: int
    is_split: bool = False
    num_keys: int = 0
    turns_once: bool = False

    @property
    def sizes(self) -> PlanSizes:
        numbers = map(len, (self.slots, self.starts, self.positions, self.tile_count, self.part_tile))
        return PlanSizes(*numbers)

    @property
    def most_keys(self) -> int:
        return self.num_keys or len(self.slots)

    def update(self, other: Plan) -> None:
        """Take over the contents of a plan of the same sizes, in one copy on the current stream.

        Raises:
            PlanError: sizes or tile differ, or only one of them is split.
        """
        mine = (self.sizes, self.key_positions is None, self.tile, self.is_split)
        theirs = (other.sizes, other.key_positions is None, other.tile, other.is_split)
        if mine != theirs:
            raise PlanError(f"a plan of {theirs} cannot be copied over one of {mine}; plan it with the same sizes.")
        self.buffer.copy_(other.buffer, non_blocking=True)

    def to(self, device: torch.device | str) -> Plan:
        """On another device."""
        sections = _Sections.of(self.sizes, self.key_positions is not None)
        return _on_device(self.buffer.to(device, non_blocking=True), sections, self.tile, self.is_split)


def plan_of(
    chains: Sequence[ChainQueries | tuple[Integers, Integers]],
    *,
    tile: int,
    num_lanes: int = 0,
    unit: int = UNIT,
    sizes: PlanSizes | None = None,
    device: torch.device | str = "cpu",
) -> Plan:
    """A plan for ``chains``, padded to ``sizes`` where they are given.

    Keys are shared out over ``num_lanes`` programs that run at once, in multiples of ``unit``; 0: one part a tile.
    Tiles that see most keys come first, so that those that are left at the end are short. On a CUDA device the numbers
    go there in one copy from pinned memory, which is not waited for.

    Raises:
        PlanError: no chain, a tile of no tokens, or more of something than ``sizes`` has room for.
    """
    links = [ChainQueries(*chain) for chain in chains]
    if not links or tile < 1 or num_lanes < 0 or unit < 1:
        about = f"{len(links)} chains in tiles of {tile}, {num_lanes} lanes and units of {unit}"
        raise PlanError(f"{about}; give one of each at least, but of lanes.")
    tiles, seen = _tiles(links, tile)
    parts = shared_out(seen, num_lanes, unit)
    needed = PlanSizes(
        sum(len(c.slots) for c in links), len(links), sum(len(c.positions) for c in links), len(tiles), len(parts.tile)
    )
    is_split = num_lanes > 0 and (sizes is not None or len(parts.tile) > len(tiles))
    sizes = sizes or PlanSizes(*(max(1, number) for number in needed))
    sizes = sizes if sizes.num_parts else sizes._replace(num_parts=most_parts(sizes.num_tiles, num_lanes))
    if any(number > room for number, room in zip(needed, sizes, strict=True)):
        raise PlanError(f"chains of {needed} do not fit into {sizes}; ask for more room.")
    sections = _Sections.of(sizes, any(chain.key_positions is not None for chain in links))
    return _on_device(_filled(links, tiles, parts, sections, torch.device(device)), sections, tile, is_split)


class _Sections(NamedTuple):
    """Where each part of a plan lies in its buffer."""

    slots: slice
    starts: slice
    lengths: slice
    positions: slice
    tile_chain: slice
    tile_first: slice
    tile_count: slice
    tile_part: slice
    tile_parts: slice
    part_tile: slice
    part_begin: slice
    part_end: slice
    key_positions: slice | None
    size: int

    @staticmethod
    def of(sizes: PlanSizes, has_key_positions: bool) -> _Sections:
        slots, chains, tokens, tiles, parts = sizes
        lengths = np.array([slots, chains, chains, tokens, *[tiles] * 5, *[parts] * 3, slots * has_key_positions])
        ends = np.cumsum(-(-lengths // ALIGNED) * ALIGNED)
        starts = np.concatenate([[0], ends[:-1]])
        found = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        turns = found.pop() if has_key_positions else None
        return _Sections._make([*found[:12], turns, int(ends[-1])])


def _tiles(chains: Sequence[ChainQueries], tile: int) -> tuple[Counts, Counts]:
    """Rows ``(chain, first token, number of tokens)``, those that see most keys first, and how many those are."""
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
    return np.stack([chain, first, count], axis=1)[order].astype(np.int32), seen[order].astype(np.int32)


def _filled(
    chains: Sequence[ChainQueries], tiles: Counts, parts: Parts, sections: _Sections, device: torch.device
) -> Tensor:
    staged = torch.empty(sections.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    buffer: Counts = staged.numpy()
    lengths = np.array([len(chain.slots) for chain in chains])
    _put(buffer, sections.slots, [chain.slots for chain in chains])
    _put(buffer, sections.starts, [np.cumsum(lengths) - lengths])
    _put(buffer, sections.lengths, [lengths])
    _put(buffer, sections.positions, [chain.positions for chain in chains])
    for column, section in enumerate((sections.tile_chain, sections.tile_first, sections.tile_count)):
        _put(buffer, section, [tiles[:, column]])
    _put(buffer, sections.part_tile, [parts.tile], NO_TILE)
    for section, numbers in zip(
        (sections.part_begin, sections.part_end, sections.tile_part, sections.tile_parts), parts[1:], strict=True
    ):
        _put(buffer, section, [numbers])
    if sections.key_positions is not None:
        turns = [np.arange(len(c.slots)) if c.key_positions is None else c.key_positions for c in chains]
        _put(buffer, sections.key_positions, turns)
    return staged.to(device, non_blocking=True)


def _put(buffer: Counts, section: slice, parts: Sequence[Integers], fill: int = 0) -> None:
    """Parts one after the other, then padding."""
    size = sum(map(len, parts))
    end = section.start + size
    np.concatenate(parts, out=buffer[section.start : end], casting="unsafe")
    buffer[end : section.stop] = fill


def _on_device(buffer: Tensor, sections: _Sections, tile: int, is_split: bool) -> Plan:
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
        tile_part=buffer[sections.tile_part],
        tile_parts=buffer[sections.tile_parts],
        part_tile=buffer[sections.part_tile],
        part_begin=buffer[sections.part_begin],
        part_end=buffer[sections.part_end],
        tile=tile,
        is_split=is_split,
    )
