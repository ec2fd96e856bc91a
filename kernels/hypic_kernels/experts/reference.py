"""What ``route``, ``scatter`` and ``combine`` mean: plain torch, any device and floating type."""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(dtype).softmax(dim=-1)
    # A stable sort, so that the lower number wins a tie.
    weights, chosen = scores.sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :top_k], chosen[:, :top_k].to(torch.int32)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights.contiguous()), chosen.contiguous()


def scatter(x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=x.device))
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0)
    return x.index_select(0, order // chosen.shape[1]), places.view(chosen.shape).to(torch.int32), ends.to(torch.int32)


def combine(
    rows: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, x: Tensor | None, gate: Tensor | None
) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    out = (weights.to(dtype)[..., None] * rows[places.long()].to(dtype)).sum(1)
    if shared is not None:
        factor = 1.0 if gate is None or x is None else (x.to(dtype) @ gate.to(dtype)).sigmoid()[:, None]
        out = out + factor * shared.to(dtype)
    return out.to(rows.dtype)
