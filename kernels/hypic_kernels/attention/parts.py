"""How the keys that tiles see are shared out over programs of about equal work: plain numpy, no device.

Parts are as equal as whole units allow. With ``T`` units a program at most, a tile of ``b`` units takes ``ceil(b / T)``
parts; ``T`` is the least with which all parts fit into the programs that run at once, or into two rounds of them where
there are as many tiles. So the last program ends about when the others do, whatever the tiles see. Where tiles are more
than that, each is one part, and the longest come first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32]

UNIT = 128
"""Keys that parts are multiples of, so that only the last block of a tile is broken."""
MOST_ROUNDS = 2
"""Rounds of programs up to which tiles are cut: with more, short tiles at the end even things out."""
NO_TILE = -1
"""The tile of a part that is padding."""


class Parts(NamedTuple):
    """Part ``p`` is the keys ``begin[p]`` to ``end[p]`` of tile ``tile[p]``; tile ``m`` has ``number[m]`` of them from
    ``first[m]`` on. Longest parts come first."""

    tile: Counts
    begin: Counts
    end: Counts
    first: Counts
    number: Counts


def shared_out(seen: NDArray[np.integer], num_lanes: int, unit: int = UNIT) -> Parts:
    """Parts of tiles that see ``seen [M]`` keys each, for ``num_lanes`` that run at once; 0: one part a tile."""
    units = np.maximum(1, -(-seen.astype(np.int64) // unit))
    is_cut = 0 < len(units) <= MOST_ROUNDS * num_lanes
    most = _most_units(units, num_lanes) if is_cut else int(units.max(initial=1))
    sizes = -(-units // -(-units // most))
    number = -(-units // sizes)
    order = np.argsort(-sizes, kind="stable")
    first = np.empty_like(number)
    first[order] = np.cumsum(number[order]) - number[order]
    tile = np.repeat(order, number[order])
    begin = (np.arange(len(tile)) - first[tile]) * sizes[tile] * unit
    end = np.minimum(begin + sizes[tile] * unit, seen[tile])
    return Parts(*(each.astype(np.int32) for each in (tile, begin, end, first, number)))


def most_parts(num_tiles: int, num_lanes: int) -> int:
    """Parts that up to ``num_tiles`` tiles can have together."""
    rounds = min(-(-num_tiles // num_lanes), MOST_ROUNDS) if num_lanes else 0
    return max(num_tiles, rounds * num_lanes)


def _most_units(units: NDArray[np.int64], num_lanes: int) -> int:
    """The least size of parts with which there are not more of them than lanes, in as few rounds as tiles allow."""
    room = num_lanes * -(-len(units) // num_lanes)
    low, high = max(1, -(-int(units.sum()) // room)), int(units.max())
    while low < high:
        middle = (low + high) // 2
        fits = int((-(-units // middle)).sum()) <= room
        low, high = (low, middle) if fits else (middle + 1, high)
    return low
