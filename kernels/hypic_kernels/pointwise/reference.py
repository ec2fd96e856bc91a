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


def heads(
    x: Tensor, weight: Tensor | None, eps: float, is_zero_centred: bool, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """``x [N, H, D]``: each head normed, if there is a weight, then rotated, if there are angles; rounded once."""
    value = wide(x)
    if weight is not None:
        scale = 1.0 + wide(weight) if is_zero_centred else wide(weight)
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * scale
    if cos is not None and sin is not None:
        half, along, across = cos.shape[1], wide(cos)[:, None], wide(sin)[:, None]
        first, second = value[..., :half], value[..., half : 2 * half]
        turned = (first * along - second * across, second * along + first * across)
        value = torch.cat([*turned, value[..., 2 * half :]], dim=-1)
    return value.to(x.dtype).contiguous()


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, silu: bool, gates_first: bool
) -> Tensor:
    """Equal parts of the last axis normed, times weight, with the gate's activation before or behind; rounded once."""
    opened = F.silu(wide(gate)) if silu else wide(gate).sigmoid()
    value = wide(x) * opened if gates_first else wide(x)
    grouped = value.view(*value.shape[:-1], num_groups, -1)
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2) * wide(weight)
    return (normed if gates_first else normed * opened).to(gate.dtype)
