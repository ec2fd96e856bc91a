"""The Lightning attention layer (arXiv 2401.04658) as MiniMax-Text-01 builds it, optionally with rotary keys.

``q, k, v = silu(W_qkv x)`` per head, a constant decay per head, a norm over all heads together, a sigmoid gate and an
output projection. Decays: ``g = -slope``, ``slope = 2^(-8 (h+1) / H) * factor`` with a factor that falls with depth
(ALiBi's slopes, arXiv 2108.12409).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.batch import Batch
from hypic.engine.layers.norm import RMSNorm, upcast
from hypic.engine.layers.rotary import Angles, rotate
from hypic.engine.linear.lightning import DecayInputs, Lightning
from hypic.engine.pool import LinearShape, Pool


def decay_slopes(num_heads: int, factor: float) -> Tensor:
    """``2^(-8 (h+1) / H) * factor``, ``[H]`` in float64 on the host."""
    heads = torch.arange(1, num_heads + 1, dtype=torch.float64, device="cpu")
    return 2.0 ** (-8.0 * heads / num_heads) * factor


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
        self.slopes = slopes

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
        return DecayInputs(q, k, v, -self.slopes.to(q.device, q.dtype).expand(len(q), -1))

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        normed = self.norm(mixed.flatten(-2)).to(projected.gate.dtype)
        out: Tensor = self.out_proj(projected.gate.sigmoid() * normed)
        return out
