"""A mixture of gated feed-forward experts (GShard, arXiv 2006.16668; Mixtral, arXiv 2401.04088).

Routers (``routers.py``) say which experts a token goes to and with what weight; experts do the work; a shared expert
sees every token (DeepSeekMoE, arXiv 2401.06066). Tokens are sorted by expert. On CUDA all experts are one product, a
kernel of ours where each gets few rows and torch's grouped one where they get many, and nothing is asked of the host;
few tokens need no sorting, and the whole layer is two launches. Elsewhere the experts that were hit are run in turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.layers.mlp import SwiGLU, gated
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.routers import SigmoidRouter, SoftmaxRouter
from hypic_kernels import experts as kernels
from hypic_kernels import matvec
from hypic_kernels.experts import few
from hypic_kernels.experts.layout import Shared, is_few

GroupedProduct = Callable[..., Tensor]


def grouped_product() -> GroupedProduct | None:
    """torch's product of runs of rows with one matrix each, under the name this torch has for it."""
    found: GroupedProduct | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    return found


class Experts(nn.Module):
    """``gate_up_proj [E, 2 I, hidden]`` and ``down_proj [E, hidden, I]``; each expert is a SwiGLU."""

    is_gated = True

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """``x [N, hidden]``, ``weights, chosen [N, k]`` -> the weighted sum of the chosen experts, ``[N, hidden]``."""
        if self.takes_few(x, chosen.shape[1]):
            return self.answer(x, few.Chosen(weights, chosen.to(torch.int32)))
        if self.asks_no_host(x):
            return kernels.combine(*self.spread(x, chosen), weights)
        order = chosen.flatten().argsort(stable=True)
        experts = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(chosen.flatten()[order], experts, right=True)
        made = self.run_in_turn(x.index_select(0, order // chosen.shape[1]), ends)
        by_token = torch.empty_like(made).index_copy(0, order, made).view(*chosen.shape, x.shape[-1])
        return (weights.to(x.dtype)[:, None] @ by_token)[:, 0]

    def asks_no_host(self, x: Tensor) -> bool:
        """Whether where rows end is read on the device alone, so that a graph of this can be replayed."""
        return self.can_group(x) or self.can_multiply(x)

    def can_group(self, x: Tensor) -> bool:
        """Whether torch's grouped product takes these: bf16 on CUDA, rows of whole 16 bytes."""
        is_aligned = all(size % 8 == 0 for size in self.down_proj.shape[1:])
        return x.is_cuda and x.dtype == torch.bfloat16 and is_aligned and grouped_product() is not None

    def can_multiply(self, x: Tensor) -> bool:
        """Whether kernels of ours do: floating types up to fp32 on CUDA, where nothing is trained."""
        return kernels.multiplies(x, self.into, self.down_proj, is_gated=self.is_gated)

    def takes_few(self, x: Tensor, top_k: int, shared: Shared | None = None) -> bool:
        """Whether tokens are so few, and kernels such, that they are not sorted."""
        return few.takes_few(x, self.into, self.down_proj, top_k, shared=shared, is_gated=self.is_gated)

    def answer(
        self,
        x: Tensor,
        routed: few.Chosen | few.Scores,
        shared: Shared | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Of few tokens, ``[N, hidden]``, what experts make of them, a shared one beside them, and the residual."""
        return few.answer(
            x, self.into, self.down_proj, routed, shared=shared, residual=residual, is_gated=self.is_gated
        )

    @property
    def into(self) -> Tensor:
        """The matrices ``[E, width, hidden]`` that tokens meet first."""
        return self.gate_up_proj

    def spread(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """What the chosen experts make of ``x``, ``[N k, hidden]`` sorted by expert, and the places ``[N, k]`` of each
        token's rows in it; ``asks_no_host`` must be true."""
        num_experts = self.down_proj.shape[0]
        if chosen.dtype != torch.int32 or not chosen.is_contiguous():
            chosen = chosen.to(torch.int32).contiguous()
        product = grouped_product() if self.can_group(x) else None
        is_for_few = product is None or kernels.fits(chosen.numel(), num_experts)
        if product is None or (is_for_few and self.can_multiply(x)):
            tokens, places, ends = kernels.order(chosen, num_experts)
            hidden = kernels.gate_up(x, self.into, ends, tokens=tokens, is_gated=self.is_gated)
            return kernels.down(hidden, self.down_proj, ends), places
        rows, places, ends = kernels.scatter(x, chosen, num_experts)
        return self.run_grouped(rows, ends, product), places

    def run_grouped(self, rows: Tensor, ends: Tensor, product: GroupedProduct) -> Tensor:
        """``rows [n, hidden]`` sorted by expert; those of expert ``e`` end before ``ends[e]``."""
        offsets = _int32(ends)
        gate, up = product(rows, self.into.mT, offs=offsets).chunk(2, dim=-1)
        return self._back(gated(gate, up), offsets, product)

    def _back(self, hidden: Tensor, offsets: Tensor, product: GroupedProduct) -> Tensor:
        """To the width of a token: by our kernel where rows are very many, which torch's product does not beat."""
        if kernels.multiplies_many(hidden, self.down_proj):
            return kernels.down(hidden, self.down_proj, offsets)
        return product(hidden, self.down_proj.mT, offs=offsets)

    def run_in_turn(self, rows: Tensor, ends: Tensor) -> Tensor:
        made, start = [rows[:0]], 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                made.append(self.run_one(expert, rows[start:end]))
            start = end
        return torch.cat(made)

    def run_one(self, expert: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


def _int32(x: Tensor) -> Tensor:
    """What is so already is not handed to torch, which takes the host as long as a conversion."""
    return x if x.dtype == torch.int32 else x.to(torch.int32)


class UngatedExperts(Experts):
    """``up_proj [E, I, hidden]`` and ``down_proj [E, hidden, I]``; each expert is ``down(relu(up(x))^2)``."""

    is_gated = False

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        nn.Module.__init__(self)
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    @property
    def into(self) -> Tensor:
        return self.up_proj

    def run_grouped(self, rows: Tensor, ends: Tensor, product: GroupedProduct) -> Tensor:
        offsets = _int32(ends)
        return self._back(F.relu(product(rows, self.up_proj.mT, offs=offsets)).square(), offsets, product)

    def run_one(self, expert: int, rows: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(rows, self.up_proj[expert])).square(), self.down_proj[expert])


class MoE(nn.Module):
    """Routed experts and, if there is one, a shared expert, behind a sigmoid gate of its own or not.

    Parameters are named as in Qwen's checkpoints: ``gate``, ``experts``, ``shared_expert``, ``shared_expert_gate``.
    """

    def __init__(
        self,
        gate: SoftmaxRouter | SigmoidRouter,
        experts: Experts,
        shared_expert: SwiGLU | None = None,
        shared_expert_gate: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.shared_expert, self.shared_expert_gate = shared_expert, shared_expert_gate

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)``, all ``[N, hidden]``; one pass where experts' rows are added up by kernel."""
        return self._at_once(x, residual) if self.experts.asks_no_host(x) else residual + self(x)

    def behind(self, norm: RMSNorm, x: Tensor, added: Tensor) -> Tensor:
        """``y + self(norm(y))`` with ``y = x + added``, all ``[N, hidden]``; of few tokens three launches."""
        gate = self.gate
        if (
            isinstance(gate, SoftmaxRouter)
            and self._takes_few(x)
            and matvec.takes_normed(added, norm.weight, gate.weight, adds=True, is_zero_centred=norm.zero_centred)
        ):
            made = matvec.normed_product(
                added, x, norm.weight, gate.weight, eps=norm.eps, is_zero_centred=norm.zero_centred
            )
            return self.experts.answer(made.normed, gate.of_logits(made.product), self._beside(), made.total)
        normed, total = norm.after(x, added)
        return self.onto(total, normed)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, hidden]`` -> ``[N, hidden]``."""
        if self.experts.asks_no_host(x):
            return self._at_once(x)
        out: Tensor = self.experts(x, *self.gate(x))
        if self.shared_expert is None:
            return out
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return out + shared

    def _at_once(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._takes_few(x):
            return self.experts.answer(x, self.gate.scored(x), self._beside(), residual)
        weights, chosen = self.gate(x)
        made, places = self.experts.spread(x, chosen)
        expert, opening = self.shared_expert, self.shared_expert_gate
        shared = None if expert is None else expert(x)
        gate = None if opening is None else opening.weight[0]
        asked = None if gate is None else x
        return kernels.combine(made, places, weights, shared=shared, x=asked, gate=gate, residual=residual)

    def _takes_few(self, x: Tensor) -> bool:
        return is_few(x.shape[0]) and self.experts.takes_few(x, self.gate.top_k, self._beside())

    def _beside(self) -> Shared | None:
        """The shared expert's matrices."""
        shared, gate = self.shared_expert, self.shared_expert_gate
        if shared is None:
            return None
        matrices = shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight
        return Shared(*matrices, None if gate is None else gate.weight[0])


class SoftmaxMoE(MoE):
    """Top-k of a softmax over all experts, weights renormalised; no shared expert."""

    def __init__(self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int) -> None:
        experts = Experts(num_experts, hidden_size, intermediate_size)
        super().__init__(SoftmaxRouter(num_experts, top_k, hidden_size), experts)
