"""Rotary positions (RoFormer, arXiv 2104.09864) on the first ``dim`` channels: channel ``i`` pairs with ``i + dim/2``.

Angles are products of whole positions with frequencies, taken in float64: at long contexts fp32 products are off by
more than an exact move may be. A move by ``p`` positions is one rotation by the angles of ``p``; states whose keys are
rotary are moved along their key axis (``B -> R_p B``, ``T -> R_p T R_p^T``), which holds where the gate is one number a
head and is refused elsewhere.

YaRN (arXiv 2309.00071) divides the slow frequencies by a factor, leaves the fast ones, and multiplies cosines and sines
by an attention factor. Scaling and rotation commute, so a move is a rotation alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypic.engine.affine import Affine
from hypic.engine.layers.norm import by_kernel
from hypic.errors import UnsupportedModel
from hypic_kernels import pointwise

MOVES_NO_GATE = (
    "linear layers with rotary keys and a gate per channel (GLA, KDA) are not supported: such a gate does not commute "
    "with rotation, so that nothing cached could be moved; load a model whose linear layers have no positions."
)


@dataclass(frozen=True)
class Angles:
    """``cos, sin [N, dim / 2]``."""

    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor) -> Angles:
        return Angles(self.cos.index_select(0, rows), self.sin.index_select(0, rows))


@dataclass(frozen=True)
class Yarn:
    """YaRN's numbers, named as in ``config.json``; betas count turns over ``original_context`` tokens."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, weight: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * weight * math.log(self.factor) + 1.0

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Frequencies ``[dim / 2]`` blended, along a ramp over the channels, with those divided by ``factor``."""
        half = len(frequencies)
        first, last = (self._channel(turns, 2 * half, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        channels = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device)
        # A ramp of no length is a step; the small number is the one that published checkpoints were run with.
        ramp = ((channels - first) / ((last - first) or 0.001)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp

    def _channel(self, num_turns: float, dim: int, theta: float) -> float:
        """The channel that turns ``num_turns`` times over the original context."""
        return dim * math.log(self.original_context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))


class Rotary(nn.Module):
    """Angles of positions, from a table that grows with the longest prompt seen."""

    def __init__(self, dim: int, theta: float, yarn: Yarn | None = None) -> None:
        super().__init__()
        self.dim = dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
        plain = theta**-exponents
        self.frequencies = plain if yarn is None else yarn.stretch(plain, theta)
        self.scale = 1.0 if yarn is None else yarn.scale
        self._table: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._scaled: dict[tuple[torch.device, torch.dtype], Angles] = {}

    def forward(self, positions: Tensor, longest: int, dtype: torch.dtype) -> Angles:
        """Angles of ``positions [N]``, all below ``longest``, with YaRN's attention factor."""
        cos, sin = self._rows(longest, positions.device, dtype).index_select(1, positions).unbind(0)
        angles = Angles(cos, sin)
        return angles if self.scale == 1.0 else Angles(angles.cos * self.scale, angles.sin * self.scale)

    def table(self, longest: int, device: torch.device, dtype: torch.dtype) -> Angles:
        """Angles of all positions below ``longest`` and some more, with YaRN's attention factor."""
        cos, sin = self._rows(longest, device, dtype).unbind(0)
        if self.scale == 1.0:
            return Angles(cos, sin)
        kept = self._scaled.get((device, dtype))
        if kept is None or len(kept.cos) != len(cos):
            kept = self._scaled[device, dtype] = Angles(cos * self.scale, sin * self.scale)
        return kept

    def moves(self, distances: Tensor, longest: int, dtype: torch.dtype) -> Angles:
        """Rotations by ``distances [N]``, for what is in place already: without the attention factor.

        A distance may be negative, where what is moved stood behind more text than it will: by that much it is turned
        back. All are below ``longest`` in magnitude.
        """
        table = self._rows(longest, distances.device, dtype)
        cos, sin = table.index_select(1, distances.abs()).unbind(0)
        return Angles(cos, sin * distances.sign()[:, None])

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
    if by_kernel(x) and x.stride(-1) == 1:
        return pointwise.heads(x, cos=angles.cos, sin=angles.sin)
    half = angles.cos.shape[-1]
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    first, second, rest = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def move(maps: Affine, angles: Angles, *, has_channel_gate: bool = False) -> Affine:
    """Maps ``[N, H, ...]`` of interiors moved to where their segments begin, one angle set per ``N``.

    Raises:
        UnsupportedModel: the family has a gate per channel, which does not commute with rotation; such a model is
            refused when it is built.
    """
    if has_channel_gate:
        raise UnsupportedModel(MOVES_NO_GATE)
    end_state = _along_keys(maps.end_state, angles)
    if maps.transition.ndim == 2:
        return Affine(maps.transition, end_state)
    return Affine(_along_keys(_along_keys(maps.transition, angles).mT, angles).mT, end_state)


def _along_keys(x: Tensor, angles: Angles) -> Tensor:
    """Rotate ``[N, H, K, V]`` along ``K``."""
    num, heads, keys, values = x.shape
    rows = x.transpose(2, 3).reshape(num, heads * values, keys)
    return rotate(rows, angles).view(num, heads, values, keys).transpose(2, 3)
