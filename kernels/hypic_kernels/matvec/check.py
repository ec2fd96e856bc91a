"""The self-checks at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic_kernels.matvec import reference
from hypic_kernels.matvec.layout import Sizes
from hypic_kernels.trust import relative_error, settle

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NUM_TOKENS = 3


def _draw(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return (drawn / float(shape[-1] ** 0.5)).to(dtype)


@dataclass(frozen=True)
class ProductVariant:
    device: torch.device
    dtype: torch.dtype
    width: int
    sizes: Sizes

    @property
    def tolerance(self) -> float:
        return 1e-5 + EPSILON[self.dtype]

    def measure(self) -> float:
        """Rows of a wider tensor, and more columns than whole blocks."""
        from hypic_kernels.matvec import triton as kernel

        x = _draw(self.device, self.dtype, (NUM_TOKENS, 2 * self.width), 0)[:, : self.width]
        weight = _draw(self.device, self.dtype, (2 * self.sizes.block_n + 1, self.width), 1)
        out = x.new_full((NUM_TOKENS, len(weight)), torch.nan)
        settle(self.device)
        kernel.product(x, weight, out, self.sizes).run()
        return relative_error(out, reference.product(x.double(), weight.double()))


@dataclass(frozen=True)
class NormedVariant:
    device: torch.device
    dtype: torch.dtype
    norm_dtype: torch.dtype
    width: int
    adds: bool
    is_zero_centred: bool
    sizes: Sizes
    eps: float = 1e-6

    @property
    def tolerance(self) -> float:
        return 1e-5 + 2 * EPSILON[self.dtype]

    def measure(self) -> float:
        """Of product, norm and sum, the largest error."""
        from hypic_kernels.matvec import triton as kernel

        x, residual = (_draw(self.device, self.dtype, (NUM_TOKENS, self.width), seed) for seed in (0, 1))
        norm_weight = _draw(self.device, self.norm_dtype, (self.width,), 2)
        weight = _draw(self.device, self.dtype, (2 * self.sizes.block_n + 1, self.width), 3)
        out = x.new_full((NUM_TOKENS, len(weight)), torch.nan)
        normed, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        added, how = residual if self.adds else None, (self.eps, self.is_zero_centred)
        settle(self.device)
        kernel.normed_product(x, added, norm_weight, weight, *how, out, normed, total, self.sizes).run()
        sum_of = x + residual if self.adds else x
        exact = reference.normed_product(sum_of.double(), None, norm_weight.double(), weight.double(), *how)
        errors = [relative_error(out, exact[0]), relative_error(normed, exact[1])]
        return max([*errors, relative_error(total, exact[2])] if self.adds else errors)
