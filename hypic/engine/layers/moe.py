"""A mixture of gated feed-forward experts (GShard, arXiv 2006.16668; Mixtral, arXiv 2401.04088)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.layers.norm import upcast


class Experts(nn.Module):
    """``gate_up_proj [E, 2 I, hidden]`` and ``down_proj [E, hidden, I]``; each expert is a SwiGLU."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def run(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


class SoftmaxMoE(nn.Module):
    """Top-k of a softmax over all experts, weights renormalised; no shared expert."""

    def __init__(self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = upcast(self.gate(x)).softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.gate.out_features).tolist()
        for expert, slots in enumerate(torch.split(order, counts)):
            if len(slots):
                tokens = slots // self.top_k
                out.index_add_(0, tokens, self.experts.run(expert, x[tokens]) * weights.flatten()[slots, None])
        return out
