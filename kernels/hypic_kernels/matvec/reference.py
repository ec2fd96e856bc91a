"""What the operations of this package mean: plain torch, any device and floating type."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from hypic_kernels.pointwise import reference as pointwise


def product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def normed_product(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, weight: Tensor, eps: float, is_zero_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = pointwise.add_rms_norm(x, residual, norm_weight, eps, is_zero_centred)
    return F.linear(normed, weight), normed, total
