"""How the keys that tiles see are shared out over programs of about equal work: plain numpy, no device.

Parts are as equal as whole units allow. With ``T`` units a program at most, a tile of ``b`` units takes ``ceil(b / T)``
parts; ``T`` is the least with which all parts fit into the programs that run at once, or into a few rounds of them, if
these end sooner. So the last program ends about when the others do, whatever the tiles see. Where tiles are more than
four rounds take, each is one part, and the longest come first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32]

UNIT = 128
"""Keys that parts are multiples of, so that only the last block of a tile is broken."""
MOST_ROUNDS = 4
"""Rounds of programs up to which tiles are cut: with more, short tiles at the end even things out."""
NEAR = 1.15
"""A time over the mean that is not worth another round."""
AT_ONCE = 32
"""Sizes of parts that are tried in one pass."""
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
    if len(seen) == 1:
        return _of_one(int(seen[0]), max(1, num_lanes), unit)
    units = np.maximum(1, -(-seen.astype(np.int32) // unit))
    is_cut = 0 < len(units) <= MOST_ROUNDS * num_lanes
    most = _best_units(units, num_lanes) if is_cut else int(units.max(initial=1))
    sizes = -(-units // -(-units // most))
    number = -(-units // sizes)
    order = (-sizes).argsort(kind="stable").astype(np.int32)
    counts, keys = number[order], sizes[order] * np.int32(unit)
    begun = counts.cumsum(dtype=np.int32) - counts
    first = np.empty_like(number)
    first[order] = begun
    tile, length = order.repeat(counts), keys.repeat(counts)
    begin = (np.arange(len(tile), dtype=np.int32) - begun.repeat(counts)) * length
    return Parts(tile, begin, np.minimum(begin + length, seen[tile]).astype(np.int32, copy=False), first, number)


def _of_one(seen: int, num_lanes: int, unit: int) -> Parts:
    """A single tile, as when a request's last token is run: one round is best, since in ``r`` rounds each lane has its
    share of the units all the same, and ``r`` beginnings."""
    units = max(1, -(-seen // unit))
    most = -(-units // num_lanes)
    size = -(-units // -(-units // most))
    number = -(-units // size)
    begin = np.arange(0, number * size * unit, size * unit, dtype=np.int32)
    tile, first = np.zeros(number, dtype=np.int32), np.zeros(1, dtype=np.int32)
    return Parts(tile, begin, np.minimum(begin + size * unit, seen), first, np.array([number], dtype=np.int32))


def most_parts(num_tiles: int, num_lanes: int) -> int:
    """Parts that up to ``num_tiles`` tiles can have together."""
    return max(num_tiles, MOST_ROUNDS * num_lanes)


def _best_units(units: Counts, num_lanes: int) -> int:
    """The size of parts with which the last round ends first; a part costs about a unit more than its keys."""
    total, longest = int(units.sum()), int(units.max())
    mean, best, best_time = total / num_lanes, 0, float("inf")
    for rounds in range(-(-len(units) // num_lanes), MOST_ROUNDS + 1):
        size = _least_units(units, total, longest, rounds * num_lanes)
        if rounds * (size + 1) < best_time:
            best, best_time = size, rounds * (size + 1)
        if best_time <= NEAR * mean + rounds:
            break
    return best


def _least_units(units: Counts, total: int, high: int, room: int) -> int:
    """The least size with which there are no more parts than ``room``, which is at least the number of tiles; these
    have ``total`` units together, and ``high`` the longest."""
    low, spare = max(1, -(-total // room)), room - len(units)
    if spare:
        high = min(high, max(low, -(-total // spare)))  # a tile has less than one part more than its share
    while high - low >= AT_ONCE:
        middle = (low + high) // 2
        fits = int((-(-units // middle)).sum()) <= room
        low, high = (low, middle) if fits else (middle + 1, high)
    sizes = np.arange(low, high, dtype=np.int32)  # a larger size never has more parts, and the last one fits
    return low + int(np.count_nonzero((-(-units // sizes[:, None])).sum(axis=1) > room))
