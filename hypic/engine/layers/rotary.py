"""Rotary positions (RoFormer, arXiv 2104.09864) on the first ``dim`` channels: channel ``i`` pairs with ``i + dim/2``.

Angles are products of whole positions with frequencies, taken in float64: at long contexts fp32 products are off by
more than an exact move may be. A move by ``p`` positions is one rotation by the angles of ``p``; states whose keys are
rotary are moved along their key axis (``B -> R_p B``, ``T -> R_p T R_p^T``), which holds where the gate is one number a
head and is refused elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypic.engine.affine import Affine


@dataclass(frozen=True)
class Angles:
    """``cos, sin [N, dim / 2]``."""

    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor) -> Angles:
        return Angles(self.cos.index_select(0, rows), self.sin.index_select(0, rows))


class Rotary(nn.Module):
    """Angles of positions, from a table that grows with the longest prompt seen."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim = dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
        self.frequencies = theta**-exponents
        self._table: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def forward(self, positions: Tensor, longest: int, dtype: torch.dtype) -> Angles:
        """Angles of ``positions [N]``, all below ``longest``."""
        table = self._rows(longest, positions.device, dtype)
        cos, sin = table.index_select(1, positions).unbind(0)
        return Angles(cos, sin)

    def _rows(self, longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        table = self._table.get((device, dtype))
        if table is None or table.shape[1] < longest:
            rows = max(1024, 1 << (longest - 1).bit_length())
            angles = torch.arange(rows, dtype=torch.float64)[:, None] * self.frequencies
            table = torch.stack([angles.cos(), angles.sin()]).to(device=device, dtype=dtype)
            self._table[device, dtype] = table
        return table


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate ``x [N, H, D]`` by one angle set per ``N``, in the angles' type; the result has ``x``'s."""
    half = angles.cos.shape[-1]
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    first, second, rest = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def move(maps: Affine, angles: Angles) -> Affine:
    """Maps ``[N, H, ...]`` of interiors moved to where their segments begin, one angle set per ``N``.

    Raises:
        AssertionError: transitions are diagonal; a per-channel gate does not commute with rotation.
    """
    kind = maps.transition.ndim
    assert kind != 3, "states behind a per-channel gate cannot be moved by rotation"
    end_state = _along_keys(maps.end_state, angles)
    if kind == 2:
        return Affine(maps.transition, end_state)
    return Affine(_along_keys(_along_keys(maps.transition, angles).mT, angles).mT, end_state)


def _along_keys(x: Tensor, angles: Angles) -> Tensor:
    """Rotate ``[N, H, K, V]`` along ``K``."""
    num, heads, keys, values = x.shape
    rows = x.transpose(2, 3).reshape(num, heads * values, keys)
    return rotate(rows, angles).view(num, heads, values, keys).transpose(2, 3)
