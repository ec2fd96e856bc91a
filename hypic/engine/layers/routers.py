"""Routers of a mixture of experts: which experts a token goes to, and with what weight (``moe.py`` has the experts).

Two kinds: a softmax over all experts (Mixtral, arXiv 2401.04088), and independent sigmoid scores in groups
(DeepSeek-V3, arXiv 2412.19437). Each is one kernel behind its product on CUDA, and plain torch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.layers.norm import by_kernel, upcast
from hypic_kernels import experts as kernels
from hypic_kernels.experts import few


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in at least fp32, ``[N, E]``; 16-bit operands are multiplied as they are."""
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.mT, out_dtype=torch.float32)
    return F.linear(upcast(x), upcast(weight))


class SoftmaxRouter(nn.Module):
    """The ``top_k`` best of a softmax over all experts, renormalised to sum to one or as they are."""

    def __init__(self, num_experts: int, top_k: int, hidden_size: int, *, renormalise: bool = True) -> None:
        super().__init__()
        self.top_k, self.renormalise = top_k, renormalise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [N, hidden]`` -> weights and experts ``[N, k]``, weights at least fp32."""
        logits = F.linear(x, self.weight)
        if by_kernel(x):
            return kernels.route(logits, self.top_k, renormalise=self.renormalise)
        weights, chosen = upcast(logits).softmax(dim=-1).topk(self.top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if self.renormalise else weights), chosen

    def scored(self, x: Tensor) -> few.Scores:
        """As ``forward``, with nothing chosen yet."""
        return self.of_logits(F.linear(x, self.weight))

    def of_logits(self, logits: Tensor) -> few.Scores:
        return few.Scores(logits, self.top_k, self.renormalise)


class SigmoidRouter(nn.Module):
    """Independent scores, chosen with a bias that only balances load (DeepSeek-V3, arXiv 2412.19437).

    Experts stand in ``num_groups`` groups; a group scores the sum of its two best, and only the ``top_groups`` best
    groups are chosen from. Weights are scores without the bias, divided by their sum, times ``scale``. All of it runs
    in at least fp32.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        *,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        renormalise: bool = True,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.top_k, self.num_groups, self.top_groups = top_k, num_groups, top_groups
        self.scale, self.renormalise = scale, renormalise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.expert_bias = nn.Parameter(torch.zeros(num_experts)) if has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [N, hidden]`` -> weights and experts ``[N, k]``, weights at least fp32."""
        if by_kernel(x):
            return self._by_kernel(wide_product(x, self.weight))
        scores = F.linear(upcast(x), upcast(self.weight)).sigmoid()
        biased = scores if self.expert_bias is None else scores + upcast(self.expert_bias)
        chosen = self._allowed(biased).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale, chosen

    def _by_kernel(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.route_groups(
            logits,
            self.top_k,
            bias=self.expert_bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scale=self.scale,
            renormalise=self.renormalise,
        )

    def scored(self, x: Tensor) -> few.Chosen:
        """As ``forward``, by kernel."""
        return few.Chosen(*self._by_kernel(wide_product(x, self.weight)))

    def _allowed(self, biased: Tensor) -> Tensor:
        """``[N, E]`` with the groups that were not chosen at minus infinity."""
        if self.num_groups == 1:
            return biased
        grouped = biased.view(len(biased), self.num_groups, biased.shape[1] // self.num_groups)
        groups = grouped.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, groups, False)
        return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
