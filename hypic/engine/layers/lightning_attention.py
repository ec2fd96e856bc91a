"""Lightning attention layers (arXiv 2401.04658): MiniMax-Text-01's, and Ring/Ling-linear 2.0's with rotary keys.

Both have a constant decay per head, ``g = -slope``, with ALiBi's slopes (arXiv 2108.12409) times a factor that falls
with depth; a norm over the heads' outputs, a sigmoid gate and an output projection. MiniMax takes
``q, k, v = silu(W_qkv x)`` per head and norms all heads together; Ring-linear norms q and k per head, rotates both,
scales q by ``D^-0.5``, and norms groups of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.batch import Batch
from hypic.engine.layers.norm import GroupRMSNorm, RMSNorm, upcast
from hypic.engine.layers.rotary import Angles, rotate
from hypic.engine.linear.lightning import DecayInputs, Lightning
from hypic.engine.pool import LinearShape, Pool


def decay_slopes(num_heads: int, factor: float) -> Tensor:
    """``2^(-8 (h+1) / H) * factor``, ``[H]`` in float64 on the host."""
    heads = torch.arange(1, num_heads + 1, dtype=torch.float64, device="cpu")
    return 2.0 ** (-8.0 * heads / num_heads) * factor


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes for any number of heads: ``2^(-8 (h+1) / H)`` for a power of two ``H``; else those of the power
    below, then every other one of the power above."""
    power = 1 << int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else slopes + alibi_slopes(2 * power)[0::2][: num_heads - power]


class Decays:
    """``g = -slope`` per head, ``[H]``, copied once to each device: a copy in every step would wait for the host."""

    def __init__(self, slopes: Tensor) -> None:
        self._slopes = slopes
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """On ``x``'s device, in its type."""
        key = (x.device, x.dtype)
        if key not in self._copies:
            self._copies[key] = -self._slopes.to(x.device, x.dtype)
        return self._copies[key]


@dataclass(frozen=True)
class Projected:
    """``qkv [N, H, 3 D]`` after its activation, ``gate [N, H D]``."""

    qkv: Tensor
    gate: Tensor


class LightningAttention(nn.Module):
    """See the module's docstring; parameters are named as in MiniMax's checkpoint. ``slopes`` is ``[H]``."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, slopes: Tensor, eps: float = 1e-6) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.family = num_heads, head_dim, Lightning()
        width = num_heads * head_dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * width, bias=False)
        self.output_gate = nn.Linear(hidden_size, width, bias=False)
        self.out_proj = nn.Linear(width, hidden_size, bias=False)
        self.norm = RMSNorm(width, eps)
        self._decays = Decays(slopes)

    @property
    def kept(self) -> LinearShape:
        return LinearShape(self.num_heads, self.head_dim, self.head_dim, "head")

    def project(self, hidden: Tensor) -> Projected:
        qkv = F.silu(self.qkv_proj(hidden)).view(len(hidden), self.num_heads, -1)
        return Projected(qkv, self.output_gate(hidden))

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        return projected

    def inputs(self, projected: Projected, angles: Angles | None = None) -> DecayInputs:
        """``q, k, v [N, H, D]`` and ``g [N, H]``, at least fp32."""
        q, k, v = torch.split(upcast(projected.qkv), self.head_dim, dim=-1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return DecayInputs(q, k, v, self._decays.like(q).expand(len(q), -1))

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        normed = self.norm(mixed.flatten(-2)).to(projected.gate.dtype)
        out: Tensor = self.out_proj(projected.gate.sigmoid() * normed)
        return out


@dataclass(frozen=True)
class GroupedLightningShape:
    """Sizes; ``norm_eps`` is that of the norms of q and k too, if it ``has_norm``; ``silu`` acts on q, k and v."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    norm_eps: float
    has_norm: bool = True
    silu: bool = False


class GroupedLightningAttention(nn.Module):
    """Ring/Ling-linear 2.0's layer; parameters are named as in its checkpoint. ``slopes`` is ``[H]``."""

    def __init__(self, shape: GroupedLightningShape, slopes: Tensor) -> None:
        super().__init__()
        self.shape, self.family = shape, Lightning()
        self._decays = Decays(slopes)
        width = shape.num_heads * shape.head_dim
        self.query_key_value = nn.Linear(shape.hidden_size, 3 * width, bias=False)
        self.g_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.g_norm = GroupRMSNorm(width, shape.num_groups, shape.norm_eps)
        self.dense = nn.Linear(width, shape.hidden_size, bias=False)
        if shape.has_norm:
            self.query_layernorm = RMSNorm(shape.head_dim, shape.norm_eps)
            self.key_layernorm = RMSNorm(shape.head_dim, shape.norm_eps)

    @property
    def kept(self) -> LinearShape:
        return LinearShape(self.shape.num_heads, self.shape.head_dim, self.shape.head_dim, "head")

    def project(self, hidden: Tensor) -> Projected:
        """``qkv`` is ``[N, 3 H, D]``: all heads of q, then of k, then of v."""
        qkv = self.query_key_value(hidden).view(len(hidden), 3 * self.shape.num_heads, self.shape.head_dim)
        return Projected(F.silu(qkv) if self.shape.silu else qkv, self.g_proj(hidden))

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        return projected

    def inputs(self, projected: Projected, angles: Angles | None = None) -> DecayInputs:
        """``q, k, v [N, H, D]`` and ``g [N, H]``, at least fp32."""
        q, k, v = upcast(projected.qkv).chunk(3, dim=1)
        if self.shape.has_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        g = self._decays.like(q).expand(len(q), -1)
        return DecayInputs(q * self.shape.head_dim**-0.5, k, v, g)

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        normed = self.g_norm(mixed.flatten(-2)).to(projected.gate.dtype)
        out: Tensor = self.dense(normed * projected.gate.sigmoid())
        return out
