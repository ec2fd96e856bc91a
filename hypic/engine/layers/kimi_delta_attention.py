"""The Kimi delta attention layer (Kimi Linear, arXiv 2510.26692) as Kimi-Linear and Ling 3 build it.

Short convolutions and silu over q, k and v; l2-normalised q and k; ``beta = sigmoid(W_b x)``; a gate per channel of the
key; a norm per head, gated by a sigmoid; an output projection; no biases. With ``f = W_f x + dt_bias`` the gate is
``g = -exp(A_log) softplus(f)``, or *bounded*, ``g = lower_bound sigmoid(exp(A_log) f)``. Kimi-Linear's ``W_f`` and
output gate have a low rank, Ling 3's are whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.batch import Batch
from hypic.engine.layers.conv import convolve_rows
from hypic.engine.layers.norm import RMSNorm, l2_normalise, rms, upcast
from hypic.engine.layers.rotary import Angles
from hypic.engine.linear.kda import KDA, KDAInputs
from hypic.engine.pool import LinearShape, Pool


@dataclass(frozen=True)
class KimiDeltaShape:
    """Sizes of the layer; ``gate_rank`` is ``None`` for whole projections, ``lower_bound`` for Kimi's gate."""

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int
    eps: float
    gate_rank: int | None = None
    lower_bound: float | None = None

    @property
    def width(self) -> int:
        """Channels of each of q, k and v."""
        return self.num_heads * self.head_dim

    @property
    def kept(self) -> LinearShape:
        return LinearShape(self.num_heads, self.head_dim, self.head_dim, "dense", 3 * self.width, self.conv_width)


@dataclass(frozen=True)
class Projected:
    """``mixed [N, 3 width]`` (raw, then convolved), ``f, z [N, width]``, ``b [N, H]``."""

    mixed: Tensor
    f: Tensor
    z: Tensor
    b: Tensor


class LowRank(nn.Module):
    """``b(a(x))``."""

    def __init__(self, size: int, rank: int, width: int) -> None:
        super().__init__()
        self.a_proj, self.b_proj = nn.Linear(size, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b_proj(self.a_proj(x))
        return out


class KimiDeltaAttention(nn.Module):
    """See the module's docstring; q, k and v are projected, and convolved, together."""

    def __init__(self, shape: KimiDeltaShape) -> None:
        super().__init__()
        self.shape, self.family = shape, KDA()
        size, width, channels = shape.hidden_size, shape.width, 3 * shape.width
        self.qkv_proj = nn.Linear(size, channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=False)
        self.f_proj = _projection(shape)
        self.g_proj = _projection(shape)
        self.b_proj = nn.Linear(size, shape.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = RMSNorm(shape.head_dim, shape.eps)
        self.o_proj = nn.Linear(width, size, bias=False)

    @property
    def kept(self) -> LinearShape:
        return self.shape.kept

    def project(self, hidden: Tensor) -> Projected:
        return Projected(self.qkv_proj(hidden), self.f_proj(hidden), self.g_proj(hidden), self.b_proj(hidden))

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        return replace(projected, mixed=convolve_rows(projected.mixed, self.conv1d.weight, batch, pool, layer))

    def inputs(self, projected: Projected, angles: Angles | None = None) -> KDAInputs:
        """From convolved projections: ``q, k, v, g [N, H, D]``, ``beta [N, H]``, at least fp32."""
        shape = self.shape
        heads = F.silu(projected.mixed).view(len(projected.mixed), 3 * shape.num_heads, shape.head_dim)
        q, k, v = torch.chunk(upcast(heads), 3, dim=1)
        q = l2_normalise(q) * shape.head_dim**-0.5
        return KDAInputs(q, l2_normalise(k), v, self._gate(projected.f), upcast(projected.b).sigmoid())

    def _gate(self, f: Tensor) -> Tensor:
        shape = self.shape
        f = (upcast(f) + upcast(self.dt_bias)).view(len(f), shape.num_heads, shape.head_dim)
        rate = upcast(self.A_log).exp().view(-1, 1)
        if shape.lower_bound is None:
            return -rate * F.softplus(f)
        return shape.lower_bound * (rate * f).sigmoid()

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        normed = rms(mixed, self.o_norm.eps) * upcast(self.o_norm.weight)
        gated = normed.flatten(-2) * upcast(projected.z).sigmoid()
        out: Tensor = self.o_proj(gated.to(projected.z.dtype))
        return out


def _projection(shape: KimiDeltaShape) -> nn.Module:
    if shape.gate_rank is None:
        return nn.Linear(shape.hidden_size, shape.width, bias=False)
    return LowRank(shape.hidden_size, shape.gate_rank, shape.width)
