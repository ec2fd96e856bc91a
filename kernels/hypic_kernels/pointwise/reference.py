"""What ``add_rms_norm`` and ``silu_mul`` mean: plain torch, any device and floating type, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, is_zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """``(normed, total)``: ``total = x + residual`` in the type of ``x``, and its norm times the weight."""
    total = x if residual is None else x + residual
    scale = 1.0 + wide(weight) if is_zero_centred else wide(weight)
    upcast = wide(total)
    normed = upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + eps) * scale
    return normed.to(x.dtype), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, rounded once."""
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)
