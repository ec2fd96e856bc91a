"""Sections of numbers in one run of bytes on their own device, and a digest that is computed where they lie.

Entries of a large model are hundreds of megabytes and never leave the device on their way to another GPU, so neither do
packing and checking. What these cost is launches, each while nobody else of this process may run: so numbers of one
type lie together, and are looked at together. The digest adds up 64-bit words, each times an odd weight that is the sum
of its row's and its column's, modulo 2**64: any changed word changes it, and so do words that changed places. Rows and
columns are summed first, so nothing as large as the data is made. It guards against damage, not against forgery: who
may speak is settled when a connection is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
# Words of a row of the digest; all data is filled up to a multiple of it.
COLUMNS = 512
ROW_BYTES = 8 * COLUMNS


@dataclass(frozen=True)
class Section:
    """Numbers of one type and shape from byte ``start`` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, data: Tensor) -> Tensor:
        """Its numbers, a view of ``data``."""
        return data[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Sections:
    """All of them, in the order in which they were asked for. ``gaps`` are the bytes between and behind them, which are
    zeros; ``floats`` are the runs of floating-point numbers of one type, the gaps among them included."""

    parts: tuple[Section, ...]
    gaps: tuple[tuple[int, int], ...]
    floats: tuple[tuple[torch.dtype, int, int], ...]
    num_bytes: int

    def of(self, data: Tensor) -> list[Tensor]:
        return [part.of(data) for part in self.parts]

    def empty(self, device: torch.device) -> Tensor:
        """``[num_bytes]`` of uint8, of which only the gaps are written."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for start, stop in self.gaps:
            data[start:stop].zero_()
        return data

    def is_finite(self, data: Tensor) -> Tensor:
        """Whether all numbers are: one flag, on the device."""
        found = [end for dtype, a, b in self.floats for end in torch.aminmax(data[a:b].view(dtype))]
        if not found:
            return torch.ones((), dtype=torch.bool, device=data.device)
        return torch.stack([end.isfinite() for end in found]).all()


def sections(wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Sections:
    """Where numbers of these types and shapes lie, those of one type together, each at the next multiple of 64."""
    order = sorted(range(len(wanted)), key=lambda number: str(wanted[number][0]))
    parts, gaps, end = dict[int, Section](), list[tuple[int, int]](), 0
    floats: dict[torch.dtype, tuple[int, int]] = {}
    for number in order:
        part = parts[number] = Section(*wanted[number], end)
        filled = end + part.num_bytes
        start, end = end, -(-filled // ALIGNMENT) * ALIGNMENT
        gaps += [(filled, end)] if filled < end else []
        if part.dtype.is_floating_point and part.num_bytes:
            floats[part.dtype] = (floats.get(part.dtype, (start, 0))[0], end)
    num_bytes = -(-end // ROW_BYTES) * ROW_BYTES
    gaps += [(end, num_bytes)] if end < num_bytes else []
    runs = tuple((dtype, *run) for dtype, run in floats.items())
    return Sections(tuple(parts[number] for number in range(len(wanted))), tuple(gaps), runs, num_bytes)


def most_bytes(num_bytes: int, num_sections: int) -> int:
    """No parcel of so many bytes in so many sections is larger."""
    return num_bytes + ALIGNMENT * num_sections + ROW_BYTES


def digest(data: Tensor) -> Tensor:
    """Of ``data [n]``, uint8, on whatever device it is: one signed 64-bit number, there."""
    rows = data[: len(data) // ROW_BYTES * ROW_BYTES].view(torch.int64).view(-1, COLUMNS)
    total = (rows.sum(1) * _weights(len(rows), data.device, _ROW) * 2).sum()
    total = total + (rows.sum(0) * (_weights(COLUMNS, data.device, _COLUMN) | 1)).sum()
    rest = data[rows.numel() * 8 :]
    if len(rest):
        total = total * 31 + (rest.long() * (_weights(len(rest), data.device, _COLUMN) | 1)).sum()
    return total * 31 + len(data)


# 2**64 over the golden ratio, and a prime near it, as signed numbers: neighbours get weights with nothing in common.
_ROW = 0x9E3779B97F4A7C15 - 2**64
_COLUMN = 0xBF58476D1CE4E5B9 - 2**64


def _weights(count: int, device: torch.device, multiplier: int) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * multiplier
