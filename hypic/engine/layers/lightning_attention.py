"""Lightning attention layers (arXiv 2401.04658): MiniMax-Text-01's, and Ring/Ling-linear 2.0's with rotary keys.

Both have a constant decay per head, ``g = -slope``, with ALiBi's slopes (arXiv 2108.12409) times a factor that falls
with depth; a norm over the heads' outputs, a sigmoid gate and an output projection. MiniMax takes
``q, k, v = silu(W_qkv x)`` per head and norms all heads together; Ring-linear norms q and k per head, rotates both,
scales q by ``D^-0.5``, and norms groups of heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.affine import Affine
from hypic.engine.batch import Batch
from hypic.engine.kernel_plan import KernelPlan
from hypic.engine.layers.decay_rows import DecayRows
from hypic.engine.layers.norm import GroupRMSNorm, RMSNorm, upcast
from hypic.engine.layers.projections import Joined
from hypic.engine.layers.rotary import Angles, rotate
from hypic.engine.linear.lightning import DecayInputs, Lightning
from hypic.engine.pool import LinearShape, Pool
from hypic_kernels import decay


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

    def by_token(self, num_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[N, H]``, a view."""
        key = (device, dtype)
        if key not in self._copies:
            self._copies[key] = -self._slopes.to(device, dtype)
        return self._copies[key].expand(num_tokens, -1)


@dataclass(frozen=True)
class Projected:
    """``qkv [N, H, 3 D]`` before its activation, ``gate [N, H D]``."""

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
        self._joined = Joined(self.qkv_proj, self.output_gate)
        self.out_proj = nn.Linear(width, hidden_size, bias=False)
        self.norm = GroupRMSNorm(width, 1, eps)
        self._decays = Decays(slopes)

    @property
    def kept(self) -> LinearShape:
        return LinearShape(self.num_heads, self.head_dim, self.head_dim, "head")

    def project(self, hidden: Tensor) -> Projected:
        qkv, gate = self._joined(hidden)
        return Projected(qkv.view(len(hidden), self.num_heads, -1), gate)

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        return projected

    def inputs(self, projected: Projected, angles: Angles | None = None) -> DecayInputs:
        """``q, k, v [N, H, D]`` and ``g [N, H]``, at least fp32."""
        q, k, v = torch.split(upcast(F.silu(projected.qkv)), self.head_dim, dim=-1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return DecayInputs(q, k, v, self._decays.by_token(len(q), q.device, q.dtype))

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        out: Tensor = self.out_proj(self.norm.gated(mixed.flatten(-2), projected.gate))
        return out

    # -- by kernels --------------------------------------------------------------------------------------------------

    def lift_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> tuple[Affine, Callable[[Tensor], Tensor]]:
        """See ``linear_kernels.FusedMixer``."""
        maps, read = self._rows(projected, angles).lift(plan)
        return maps, lambda states: self.output(read(states), projected)

    def step_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> Tensor:
        """See ``linear_kernels.FusedMixer``."""
        return self.output(self._rows(projected, angles).step(plan, pool, layer), projected)

    def _rows(self, projected: Projected, angles: Angles | None) -> DecayRows:
        q, k, v = torch.split(projected.qkv, self.head_dim, dim=-1)
        return DecayRows(q, k, v, self._decays.by_token(len(q), q.device), decay.Rule(silu=True)).at(angles)


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
        self._joined = Joined(self.query_key_value, self.g_proj)
        if shape.has_norm:
            self.query_layernorm = RMSNorm(shape.head_dim, shape.norm_eps)
            self.key_layernorm = RMSNorm(shape.head_dim, shape.norm_eps)

    @property
    def kept(self) -> LinearShape:
        return LinearShape(self.shape.num_heads, self.shape.head_dim, self.shape.head_dim, "head")

    def project(self, hidden: Tensor) -> Projected:
        """``qkv`` is ``[N, 3 H, D]``: all heads of q, then of k, then of v."""
        qkv, gate = self._joined(hidden)
        return Projected(qkv.view(len(hidden), 3 * self.shape.num_heads, self.shape.head_dim), gate)

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        return projected

    def inputs(self, projected: Projected, angles: Angles | None = None) -> DecayInputs:
        """``q, k, v [N, H, D]`` and ``g [N, H]``, at least fp32."""
        qkv = F.silu(projected.qkv) if self.shape.silu else projected.qkv
        q, k, v = upcast(qkv).chunk(3, dim=1)
        if self.shape.has_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        g = self._decays.by_token(len(q), q.device, q.dtype)
        return DecayInputs(q * self.shape.head_dim**-0.5, k, v, g)

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        out: Tensor = self.dense(self.g_norm.gated(mixed.flatten(-2), projected.gate))
        return out

    # -- by kernels --------------------------------------------------------------------------------------------------

    def lift_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> tuple[Affine, Callable[[Tensor], Tensor]]:
        """See ``linear_kernels.FusedMixer``."""
        maps, read = self._rows(projected, angles).lift(plan)
        return maps, lambda states: self.output(read(states), projected)

    def step_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> Tensor:
        """See ``linear_kernels.FusedMixer``."""
        return self.output(self._rows(projected, angles).step(plan, pool, layer), projected)

    def _rows(self, projected: Projected, angles: Angles | None) -> DecayRows:
        q, k, v = projected.qkv.chunk(3, dim=1)
        rule = decay.Rule(silu=self.shape.silu, eps=self.shape.norm_eps, scale=self.shape.head_dim**-0.5)
        if self.shape.has_norm:
            rule = replace(rule, q_weight=self.query_layernorm.weight, k_weight=self.key_layernorm.weight)
        return DecayRows(q, k, v, self._decays.by_token(len(q), q.device), rule).at(angles)
