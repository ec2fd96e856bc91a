"""How a step's tokens are cut into tiles for the attention kernel, and the keys that these see into parts.

All of it follows from what the host knows: which tokens, which positions, how many keys. ``Tiling`` says how for one
model and device; ``tile_arrays`` makes the numbers, ``attention_plan`` names them once they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hypic.engine.chain import Chain, RowLink
from hypic.engine.kernel_arrays import Arrays, Ints
from hypic.engine.kernel_buffer import Sent
from hypic_kernels import attention as paged

TILE = 16
MOST_SHORT = 32
"""Tokens of a tile of short rows: two seams or more in one tile wait for the keys of the last."""
MOST_TURNED_BYTES = 128 << 20
"""Of keys that a recorded step turns once for all tiles; one that may see more turns them in every tile."""


@dataclass(frozen=True)
class Tiling:
    """Tokens of a tile where rows are ``short`` and where they are ``long``, programs that run at once for these and
    for tiles of one token, and what a key takes that is turned once for all tiles."""

    short: int = TILE
    long: int = TILE
    short_lanes: int = 66
    long_lanes: int = 66
    decode_lanes: int = 132
    turned_bytes: int = 0

    def tile(self, chains: Sequence[Chain], is_decode: bool, is_recorded: bool) -> int:
        """Rows that a program would leave empty cost as much as full ones. A recorded step's tile is given."""
        if is_decode:
            return 1
        if is_recorded or self.long == self.short:
            return self.short
        lengths = [len(link.ids) for chain in chains for link in chain.links if isinstance(link, RowLink)]
        return self.long if sum(lengths) >= self.long * len(lengths) else self.short

    def lanes(self, tile: int) -> int:
        return self.decode_lanes if tile == 1 else self.short_lanes if tile == self.short else self.long_lanes

    def most_parts(self, num_tiles: int, tile: int) -> int:
        return paged.most_parts(num_tiles, self.lanes(tile))

    def most_keys(self, num_chains: int, max_context: int) -> int:
        """Keys of a recorded step for which there is room once they are turned; 0 where that would be too much."""
        num_keys = num_chains * max_context
        return num_keys if 0 < num_keys * self.turned_bytes <= MOST_TURNED_BYTES else 0


def tiling_of(heads: Sequence[tuple[paged.HeadDims, int]], dtype: torch.dtype, device: torch.device) -> Tiling:
    """For a model whose layers have these heads and numbers of key heads; what fits all of them."""
    if not heads or dtype not in paged.STORAGE:
        return Tiling()
    chip = paged.chip_of(device)
    rows = [paged.most_rows(dims, dtype, chip.shared_bytes) for dims, _ in heads]
    most = min([*rows, *(max(TILE, n // dims.group) for n, (dims, _) in zip(rows, heads, strict=True))])
    tiles = min(most, MOST_SHORT), most, 1
    short_lanes, long_lanes, decode_lanes = (
        min(paged.lanes_of(dims, dtype, tile, num, chip, turns_once=tile > 1) for dims, num in heads) for tile in tiles
    )
    turned_bytes = max(num * dims.rotary_dim * dtype.itemsize for dims, num in heads)
    return Tiling(tiles[0], tiles[1], short_lanes, long_lanes, decode_lanes, turned_bytes)


def tile_arrays(
    chains: Sequence[Chain], spans: Sequence[slice], is_dense: Sequence[bool], found: Arrays, tile: int, tiling: Tiling
) -> dict[str, Ints]:
    """Tiles of up to ``tile`` tokens of one chain; and, for the last layer, one of each token whose logits are wanted,
    counted among these."""
    lengths = np.asarray([len(chain.context) for chain in chains], dtype=np.int32)
    finals = found["finals"]
    made = {"lengths": lengths, "final_positions": found["positions"][finals]}
    tiles = _tiles(spans, is_dense, tile)
    if tile == 1 and len(finals) == len(lengths) == len(tiles[0]):  # a decode step: its tokens are all wanted
        named = _named("", tiles, found["positions"], lengths, tiling.decode_lanes)
        return made | named | {f"final_{name}": values for name, values in named.items()}
    wanting = np.flatnonzero([chain.wants_logits for chain in chains]).astype(np.int32)
    numbers = np.arange(len(wanting), dtype=np.int32)
    wanted = (wanting, numbers, np.ones_like(numbers))
    made |= _named("", tiles, found["positions"], lengths, tiling.lanes(tile))
    made |= _named("final_", wanted, made["final_positions"], lengths, tiling.decode_lanes)
    return made


def _tiles(spans: Sequence[slice], is_dense: Sequence[bool], tile: int) -> tuple[Ints, Ints, Ints]:
    """Chain, first token and number of tokens of every tile, in order."""
    if len(spans) == 1 and not any(is_dense):
        return _tiles_of_one(spans[0], tile)
    starts = np.asarray([span.start for span in spans])
    counts = np.asarray([0 if dense else s.stop - s.start for s, dense in zip(spans, is_dense, strict=True)])
    per_chain = -(-counts // tile)
    chain = np.repeat(np.arange(len(counts)), per_chain)
    begun = (np.arange(len(chain)) - np.repeat(np.cumsum(per_chain) - per_chain, per_chain)) * tile
    found = (chain, starts[chain] + begun, np.minimum(tile, counts[chain] - begun))
    return tuple(each.astype(np.int32) for each in found)  # type: ignore[return-value]


def _tiles_of_one(span: slice, tile: int) -> tuple[Ints, Ints, Ints]:
    first = np.arange(span.start, span.stop, tile, dtype=np.int32)
    return np.zeros_like(first), first, np.minimum(tile, span.stop - first)


def _named(
    prefix: str, tiles: tuple[Ints, Ints, Ints], positions: Ints, lengths: Ints, num_lanes: int
) -> dict[str, Ints]:
    """Tiles and parts under the names by which they are sent."""
    chain, first, count = tiles
    seen = np.minimum(positions[first + count - 1] + 1, lengths[chain])
    parts = paged.shared_out(seen, num_lanes)
    found = {
        "tile_chain": chain, "tile_first": first, "tile_count": count, "tile_part": parts.first,
        "tile_parts": parts.number, "part_tile": parts.tile, "part_begin": parts.begin, "part_end": parts.end,
    }  # fmt: skip
    return {prefix + name: values for name, values in found.items()}


def attention_plan(
    sent: Sent, slots: Tensor, prefix: str, positions: Tensor, tile: int, num_keys: int, is_recorded: bool
) -> paged.Plan:
    """The plan over arrays that were sent; ``num_keys`` are turned once, if any. What a recorded step is replayed with
    may be split even if what it was recorded with was not."""
    names = ("tile_chain", "tile_first", "tile_count", "tile_part", "tile_parts", "part_tile", "part_begin", "part_end")
    numbers = {name: sent[prefix + name] for name in names}
    return paged.Plan(
        buffer=slots,
        slots=slots,
        key_positions=sent.get("key_positions"),
        starts=sent["starts"],
        lengths=sent["lengths"],
        positions=positions,
        **numbers,
        tile=tile,
        is_split=is_recorded or len(numbers["part_tile"]) > len(numbers["tile_chain"]),
        num_keys=num_keys,
        turns_once=num_keys > 0,
    )
