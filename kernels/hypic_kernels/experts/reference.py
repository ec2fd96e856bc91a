"""What the operations of this package mean: plain torch, any device and floating type."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels.experts.layout import Shared


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(dtype).softmax(dim=-1)
    chosen = _best(scores, top_k)
    weights = scores.gather(-1, chosen)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), chosen.to(torch.int32)


def route_groups(
    logits: Tensor, bias: Tensor | None, top_k: int, num_groups: int, top_groups: int, scale: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        grouped = biased.view(len(biased), num_groups, -1)
        best = _best(grouped.topk(2, dim=-1).values.sum(-1), top_groups)
        is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        biased = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    chosen = _best(biased, top_k)
    weights = scores.gather(-1, chosen) + (scores.sum(-1, keepdim=True) * 0)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, chosen.to(torch.int32)


def _best(scores: Tensor, count: int) -> Tensor:
    """Numbers of the ``count`` largest; by a stable sort, so that the lower number wins a tie."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def scatter(x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=x.device))
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0)
    return x.index_select(0, order // chosen.shape[1]), places.view(chosen.shape).to(torch.int32), ends.to(torch.int32)


def order(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device)[:, None]
    rows, places, ends = scatter(tokens, chosen, num_experts)
    return rows[:, 0], places, ends


def gate_up(x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None, is_gated: bool) -> Tensor:
    def activated(product: Tensor) -> Tensor:
        if not is_gated:
            return F.relu(product).square()
        gate, up = product.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _products(x if tokens is None else x.index_select(0, tokens), weight, ends, activated)


def down(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _products(rows, weight, ends, lambda product: product)


def _products(rows: Tensor, weight: Tensor, ends: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounded once; rows behind the last end are zero."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    made = [finish(rows[run].to(dtype) @ weight[expert].to(dtype).T) for expert, run in _runs(ends)]
    made.append(finish(rows.new_zeros((len(rows) - sum(map(len, made)), weight.shape[1]), dtype=dtype)))
    return torch.cat(made).to(rows.dtype)


def _runs(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    x: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    out = (weights.to(dtype)[..., None] * rows[places.long()].to(dtype)).sum(1)
    if shared is not None:
        factor = 1.0 if gate is None or x is None else (x.to(dtype) @ gate.to(dtype)).sigmoid()[:, None]
        out = out + factor * shared.to(dtype)
    return out.to(rows.dtype) if residual is None else residual + out.to(rows.dtype)


def answer(
    x: Tensor,
    into: Tensor,
    back: Tensor,
    weights: Tensor,
    chosen: Tensor,
    shared: Shared | None,
    residual: Tensor | None,
    is_gated: bool,
) -> Tensor:
    """All that a layer of experts makes of ``x [N, D]``, experts by experts; rounded between products and once after
    the sum."""
    num_tokens, top_k = chosen.shape
    tokens, places, ends = order(chosen, len(into))
    made = down(gate_up(x, into, ends, tokens, is_gated).to(_wide(x)), back, ends)
    whole = None
    if shared is not None:
        matrix = torch.cat([shared.first, shared.up]) if is_gated else shared.up
        all_rows = torch.full((1,), num_tokens, dtype=torch.int32, device=x.device)
        whole = gate_up(x, matrix[None], all_rows, None, is_gated).to(_wide(x)) @ shared.down.to(_wide(x)).T
    gate = None if shared is None else shared.gate
    out = combine(made, places, weights, whole, None if gate is None else x, gate).to(x.dtype)
    return out if residual is None else residual + out


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
