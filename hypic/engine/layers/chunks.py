"""Inputs of a family's recurrence, regrouped from tokens to chunks."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from torch import Tensor
from torch.nn import functional as F

Inputs = TypeVar("Inputs")


def chunked(x: Inputs, chunks: Tensor) -> Inputs:
    """Inputs by token, ``[N, H, ...]``, to inputs by chunk, ``[M, H, C, ...]``, zero where padded."""

    def regroup(tensor: Tensor) -> Tensor:
        padded = F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, 1))
        picked = padded.index_select(0, chunks.view(-1))
        return picked.view(*chunks.shape, *tensor.shape[1:]).transpose(1, 2).contiguous()

    return type(x)(**{f.name: regroup(getattr(x, f.name)) for f in fields(x)})  # type: ignore[arg-type]
