"""The Mamba-2 layer (arXiv 2405.21060) as Granite 4, Bamba, Nemotron-H, Falcon-H1 and Zamba2 build it.

``[z | u B C | dt] = W_in x``; a short convolution and silu over ``u B C``; ``dt = softplus(dt + dt_bias)`` between its
limits; ``g = -exp(A_log) dt``, and ``dt u`` is what the state is given. To what is read of the state ``D u`` is added;
then comes a gate and a norm, and the output projection. The gate, ``silu(z)``, stands before a norm over groups of
channels; Falcon-H1 may put it behind the norm, or leave the norm out, and multiplies what ``W_in`` reads and each of
the five parts of what it gives.
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
from hypic.engine.layers.conv import convolve_planned, convolve_rows
from hypic.engine.layers.decay_rows import DecayRows
from hypic.engine.layers.norm import GroupRMSNorm, by_kernel, upcast
from hypic.engine.layers.rotary import Angles
from hypic.engine.linear.mamba2 import Mamba2, Mamba2Inputs
from hypic.engine.pool import LinearShape, Pool
from hypic_kernels import decay

NO_LIMIT = (0.0, math.inf)


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of the layer, and where variants differ.

    ``eps`` is ``None`` without a norm. ``scales`` multiply the input and ``z, u, B, C, dt``. ``biases`` are those of
    the input projection, the convolution and the output projection.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    eps: float | None
    time_step_limit: tuple[float, float] = NO_LIMIT
    biases: tuple[bool, bool, bool] = (False, True, False)
    is_norm_first: bool = False
    scales: tuple[float, ...] = (1.0,) * 6

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of ``B``, and of ``C``."""
        return self.num_groups * self.state_size

    @property
    def kept(self) -> LinearShape:
        channels = self.inner_size + 2 * self.group_size
        return LinearShape(self.num_heads, self.state_size, self.head_dim, "head", channels, self.conv_width)


@dataclass(frozen=True)
class Projected:
    """``z [N, inner]``, ``mixed [N, channels]`` (raw, then convolved and behind silu), ``dt [N, H]``."""

    z: Tensor
    mixed: Tensor
    dt: Tensor


class Mamba2Mixer(nn.Module):
    """See the module's docstring; parameters are named as in the checkpoint."""

    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.shape, self.family = shape, Mamba2()
        channels, in_bias, conv_bias, out_bias = shape.kept.conv_channels, *shape.biases
        self.in_proj = nn.Linear(shape.hidden_size, shape.inner_size + channels + shape.num_heads, bias=in_bias)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=conv_bias)
        self.A_log = nn.Parameter(torch.zeros(shape.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.num_heads))
        self.D = nn.Parameter(torch.ones(shape.num_heads))
        self.norm = None if shape.eps is None else GroupRMSNorm(shape.inner_size, shape.num_groups, shape.eps)
        self.out_proj = nn.Linear(shape.inner_size, shape.hidden_size, bias=out_bias)

    @property
    def kept(self) -> LinearShape:
        return self.shape.kept

    def project(self, hidden: Tensor) -> Projected:
        shape = self.shape
        first, *parts = shape.scales
        projected = self.in_proj(hidden if first == 1.0 else hidden * first)
        if any(scale != 1.0 for scale in parts):
            sizes = (shape.inner_size, shape.inner_size, shape.group_size, shape.group_size, shape.num_heads)
            scaled = [part * scale for part, scale in zip(projected.split(sizes, dim=-1), parts, strict=True)]
            projected = torch.cat(scaled, dim=-1)
        return Projected(*projected.split([shape.inner_size, shape.kept.conv_channels, shape.num_heads], dim=-1))

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        mixed = convolve_rows(projected.mixed, self.conv1d.weight, batch, pool, layer, self.conv1d.bias)
        return replace(projected, mixed=F.silu(mixed))

    def inputs(self, projected: Projected, angles: Angles | None = None) -> Mamba2Inputs:
        """From convolved projections: ``q, k [N, G, state]``, ``v [N, H, P]``, ``g [N, H]``, at least fp32."""
        shape, num = self.shape, len(projected.mixed)
        sizes = [shape.inner_size, shape.group_size, shape.group_size]
        u, k, q = torch.split(upcast(projected.mixed), sizes, dim=-1)
        dt = F.softplus(upcast(projected.dt) + upcast(self.dt_bias)).clamp(*shape.time_step_limit)
        g = -upcast(self.A_log).exp() * dt
        v = u.view(num, shape.num_heads, -1) * dt[..., None]
        return Mamba2Inputs(q.view(num, shape.num_groups, -1), k.view(num, shape.num_groups, -1), v, g)

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        u = upcast(projected.mixed[:, : self.shape.inner_size]).view_as(mixed)
        read = (mixed + upcast(self.D)[:, None] * u).flatten(-2)
        if self.norm is not None and by_kernel(read):
            out: Tensor = self.out_proj(self.norm.behind_silu(read, projected.z, self.shape.is_norm_first))
            return out
        gate = F.silu(upcast(projected.z))
        if self.norm is None:
            gated = read * gate
        elif self.shape.is_norm_first:
            gated = self.norm(read) * gate
        else:
            gated = self.norm(read * gate)
        out = self.out_proj(gated.to(projected.z.dtype))
        return out

    # -- by kernels --------------------------------------------------------------------------------------------------

    def lift_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> tuple[Affine, Callable[[Tensor], Tensor]]:
        """See ``linear_kernels.FusedMixer``."""
        projected = self._convolved(projected, plan, pool, layer)
        maps, read = self._rows(projected).lift(plan)
        return maps, lambda states: self.output(read(states), projected)

    def step_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> Tensor:
        """See ``linear_kernels.FusedMixer``."""
        projected = self._convolved(projected, plan, pool, layer)
        return self.output(self._rows(projected).step(plan, pool, layer), projected)

    def _convolved(self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int) -> Projected:
        weight, bias = self.conv1d.weight, self.conv1d.bias
        mixed = convolve_planned(projected.mixed, weight, plan, pool, layer, bias=bias, has_silu=True)
        return replace(projected, mixed=mixed)

    def _rows(self, convolved: Projected) -> DecayRows:
        x = self.inputs(convolved)
        return DecayRows(x.q, x.k, x.v, x.g, decay.Rule())
