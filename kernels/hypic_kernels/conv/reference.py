"""What ``convolve`` and ``write_tails`` mean: plain torch, any device and floating type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels.conv.sources import NOTHING


def gather(x: Tensor, tails: Tensor, sources: Tensor) -> Tensor:
    """Inputs ``[..., C]`` that ``sources [...]`` name: rows of ``x``, rows of ``tails``, or zeros."""
    stored = tails.reshape(-1, tails.shape[-1])
    is_nothing = sources == NOTHING
    from_x = x[torch.where(sources >= 0, sources, 0).long()] if len(x) else 0.0
    from_tails = stored[torch.where((sources < 0) & ~is_nothing, -1 - sources, 0).long()].to(x.dtype)
    found = torch.where((sources >= 0)[..., None], from_x, from_tails)
    return torch.where(is_nothing[..., None], 0.0, found)


def convolve(
    x: Tensor, tails: Tensor, sources: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool, dtype: torch.dtype
) -> Tensor:
    """``sum_j weight[:, j] input_j (+ bias)``, then silu: ``[N, C]`` in ``dtype``."""
    inputs = gather(x, tails, sources).to(dtype)
    out = torch.einsum("nwc,cw->nc", inputs, weight.to(dtype))
    if bias is not None:
        out = out + bias.to(dtype)
    return F.silu(out) if has_silu else out
