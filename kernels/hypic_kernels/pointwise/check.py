"""The self-checks at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

import functools
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


@dataclass(frozen=True)
class HeadsVariant:
    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    angle_dtype: torch.dtype | None
    num_heads: int
    size: int
    num_turned: int
    is_zero_centred: bool

    @staticmethod
    def of(x: Tensor, weight: Tensor | None, is_zero_centred: bool, cos: Tensor | None) -> HeadsVariant:
        dtypes = (None if weight is None else weight.dtype, None if cos is None else cos.dtype)
        num_turned = 0 if cos is None else cos.shape[1]
        return _heads_variant(x.device, x.dtype, *dtypes, x.shape[1], x.shape[2], num_turned, is_zero_centred)

    @property
    def tolerance(self) -> float:
        return 1e-6 + EPSILON[self.dtype]

    def measure(self) -> float:
        from hypic_kernels.pointwise import heading as kernel

        wide = _random(self.device, self.dtype, 2 * self.num_heads * self.size, 0)
        x = wide.view(len(wide), 2, self.num_heads, -1)[:, 1]
        angles = _random(self.device, torch.float32, 2 * max(self.num_turned, 1), 1)
        weight = (
            None if self.weight_dtype is None else _random(self.device, self.weight_dtype, self.size, 2)[0].contiguous()
        )
        cos, sin = (None, None) if self.angle_dtype is None else angles.to(self.angle_dtype).chunk(2, dim=1)
        out = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
        kernel.heads(x, weight, 1e-5, self.is_zero_centred, cos, sin, out).run()
        exact_weight = None if weight is None else weight.double()
        exact_cos, exact_sin = (None, None) if cos is None or sin is None else (cos.double(), sin.double())
        return relative_error(
            out, reference.heads(x.double(), exact_weight, 1e-5, self.is_zero_centred, exact_cos, exact_sin)
        )


# Each is made once: all layers of a kind ask with the same.
_heads_variant = functools.cache(HeadsVariant)


@dataclass(frozen=True)
class GateVariant:
    device: torch.device
    dtype: torch.dtype
    gate_dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    num_groups: int
    silu: bool
    gates_first: bool

    @property
    def tolerance(self) -> float:
        return 1e-6 + EPSILON[self.gate_dtype]

    def measure(self) -> float:
        from hypic_kernels.pointwise import heading as kernel

        x, gate = _random(self.device, self.dtype, self.size, 0), _random(self.device, self.gate_dtype, self.size, 1)
        weight = _random(self.device, self.weight_dtype, self.size, 2)[0].contiguous()
        out, how = torch.full_like(gate, torch.nan), (self.num_groups, 1e-5, self.silu, self.gates_first)
        kernel.gated_group_norm(x, gate, weight, *how, out).run()
        return relative_error(out, reference.gated_group_norm(x.double(), gate.double(), weight.double(), *how))
