"""Root-mean-square norms (Zhang and Sennrich, arXiv 1910.07467), computed in at least fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic_kernels import pointwise


def upcast(x: Tensor) -> Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def by_kernel(x: Tensor) -> bool:
    """Whether one kernel does what several operations of torch would: on a GPU, where nothing is trained."""
    return x.is_cuda and x.dtype != torch.float64 and not torch.is_grad_enabled()


def rms(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in at least fp32."""
    wide = upcast(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, in at least fp32."""
    wide = upcast(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """``rms(x) * w``, or ``rms(x) * (1 + w)`` where the checkpoint's weights are centred at zero."""

    def __init__(self, size: int, eps: float, *, zero_centred: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if by_kernel(x):
            if x.ndim == 3:
                return self._of_heads(x)
            if x.ndim == 2:
                return self._by_kernel(x, None)[0]
            return self._by_kernel(x.reshape(-1, x.shape[-1]), None)[0].view(x.shape)
        weight = upcast(self.weight)
        return (rms(x, self.eps) * (1.0 + weight if self.zero_centred else weight)).to(x.dtype)

    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + added``, both ``[N, size]``, and that sum."""
        if by_kernel(x):
            return self._by_kernel(added, x)
        total = x + added
        return self(total), total

    def _of_heads(self, x: Tensor) -> Tensor:
        return pointwise.heads(x, weight=self.weight, eps=self.eps, is_zero_centred=self.zero_centred)

    def _by_kernel(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return pointwise.add_rms_norm(x, residual, self.weight, eps=self.eps, is_zero_centred=self.zero_centred)


class GatedRMSNorm(nn.Module):
    """``rms(x) * w * silu(gate)``: norm before gate; ``x`` and ``gate`` are ``[..., size]``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = rms(x, self.eps) * upcast(self.weight)
        return (normed * F.silu(upcast(gate))).to(gate.dtype)


class GroupRMSNorm(nn.Module):
    """``rms`` over each of ``num_groups`` equal parts of the last axis, times a weight per channel."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        grouped = rms(x.reshape(*x.shape[:-1], self.num_groups, -1), self.eps)
        return (grouped.flatten(-2) * upcast(self.weight)).to(x.dtype)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of ``x [N, size]``, rounded to the type of ``gate [N, size]``, times ``sigmoid(gate)``."""
        if by_kernel(x):
            return pointwise.gated_group_norm(x, gate, self.weight, num_groups=self.num_groups, eps=self.eps)
        normed: Tensor = self(x).to(gate.dtype)
        return normed * gate.sigmoid()

    def behind_silu(self, x: Tensor, gate: Tensor, is_norm_first: bool) -> Tensor:
        """The norm of ``x silu(gate)``, or of ``x``, times ``silu(gate)``; both ``[N, size]``, by kernel."""
        return pointwise.gated_group_norm(
            x, gate, self.weight, num_groups=self.num_groups, eps=self.eps, silu=True, gates_first=not is_norm_first
        )
