"""Random rows with histories of every kind, for tests, self-check and bench."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic_kernels.conv import reference
from hypic_kernels.conv.sources import NOTHING, tail_source


@dataclass(frozen=True)
class Problem:
    """Arguments of ``convolve``; the last rows of ``sources`` and of ``write_slots`` are padding."""

    x: Tensor
    tails: Tensor
    sources: Tensor
    weight: Tensor
    bias: Tensor
    write_sources: Tensor
    write_slots: Tensor

    @staticmethod
    def random(
        lengths: tuple[int, ...] = (5, 1, 0, 9, 2),
        num_channels: int = 40,
        width: int = 4,
        *,
        dtype: torch.dtype = torch.float32,
        tail_dtype: torch.dtype | None = None,
        weight_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Problem:
        """Row ``r`` stands behind the tail of slot ``r``, every third one behind zeros; it writes the slot of the next
        row, so that reading after writing would show. ``x`` is a part of a wider projection."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw)

        sources, written = _tables(lengths, width)
        slots = [(row + 1) % max(1, len(lengths)) for row in range(len(lengths))] + [-1]
        stored = dtype if weight_dtype is None else weight_dtype
        kept = dtype if tail_dtype is None else tail_dtype
        return Problem(
            x=normal(sum(lengths), num_channels + 8).to(device, dtype)[:, 8:],
            tails=normal(len(lengths) + 1, width - 1, num_channels).to(device, kept),
            sources=torch.tensor(sources, dtype=torch.int32).view(-1, width).to(device),
            weight=normal(num_channels, 1, width).to(device, stored)[:, 0],
            bias=normal(num_channels).to(device, stored),
            write_sources=torch.tensor(written, dtype=torch.int32).view(-1, width - 1).to(device),
            write_slots=torch.tensor(slots, dtype=torch.int32).to(device),
        )

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """``out`` and ``scratch``, all NaN, and a copy of the tails to write."""
        out = torch.full((len(self.sources), self.x.shape[1]), math.nan, dtype=self.x.dtype, device=self.x.device)
        scratch = self.tails.new_full((*self.write_sources.shape, self.x.shape[1]), math.nan)
        return out, scratch, self.tails.clone()

    def solve(self, has_bias: bool = True, has_silu: bool = True) -> tuple[Tensor, Tensor]:
        """``out`` and the tails afterwards, by the reference in float64."""
        bias = self.bias if has_bias else None
        out = reference.convolve(self.x, self.tails, self.sources, self.weight, bias, has_silu, torch.float64)
        tails, kept = self.tails.double(), self.write_slots >= 0
        written = reference.gather(self.x.double(), self.tails.double(), self.write_sources)
        tails[self.write_slots[kept].long()] = written[kept]
        return out, tails


def _tables(lengths: tuple[int, ...], width: int) -> tuple[list[list[int]], list[list[int]]]:
    sources, written, token = [], [], 0
    for number, length in enumerate(lengths):
        kept = [tail_source(number, row, width) for row in range(width - 1)]
        seen = [NOTHING] * (width - 1) if number % 3 == 2 else kept
        seen = seen + list(range(token, token + length))
        sources += [seen[place : place + width] for place in range(length)]
        written.append(seen[len(seen) - width + 1 :])
        token += length
    return [*sources, [NOTHING] * width], [*written, [NOTHING] * (width - 1)]
