"""The self-checks at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic_kernels.pointwise import reference
from hypic_kernels.trust import relative_error

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What rounding once or twice adds to a relative error, at most."""


def _random(device: torch.device, dtype: torch.dtype, size: int, seed: int) -> Tensor:
    return torch.randn(7, size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@dataclass(frozen=True)
class NormVariant:
    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    adds: bool
    is_zero_centred: bool
    eps: float = 1e-6

    @property
    def tolerance(self) -> float:
        return 1e-6 + EPSILON[self.dtype]

    def measure(self) -> float:
        from hypic_kernels.pointwise import triton as kernel

        x, residual = (_random(self.device, self.dtype, self.size, seed) for seed in (0, 1))
        weight = _random(self.device, self.weight_dtype, self.size, 2)[0].contiguous()
        normed, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        added = residual if self.adds else None
        kernel.add_rms_norm(x, added, weight, self.eps, self.is_zero_centred, normed, total).run()
        exact_total = x + residual if self.adds else x
        exact, _ = reference.add_rms_norm(exact_total.double(), None, weight.double(), self.eps, self.is_zero_centred)
        errors = [relative_error(normed, exact)]
        return max([*errors, relative_error(total, exact_total.double())] if self.adds else errors)


@dataclass(frozen=True)
class SiluVariant:
    device: torch.device
    dtype: torch.dtype
    size: int

    @property
    def tolerance(self) -> float:
        return 1e-6 + EPSILON[self.dtype]

    def measure(self) -> float:
        from hypic_kernels.pointwise import triton as kernel

        gate, up = (_random(self.device, self.dtype, self.size, seed) for seed in (0, 1))
        out = torch.full_like(gate, torch.nan)
        kernel.silu_mul(gate, up, out).run()
        return relative_error(out, reference.silu_mul(gate.double(), up.double()))
