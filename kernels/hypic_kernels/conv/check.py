"""The self-check at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hypic_kernels.conv.problem import Problem
from hypic_kernels.conv.sources import CANDIDATES, Config
from hypic_kernels.trust import relative_error

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""What rounding to a type adds to a relative error, at most."""


@dataclass(frozen=True)
class Variant:
    device: torch.device
    dtype: torch.dtype
    tail_dtype: torch.dtype
    weight_dtype: torch.dtype
    width: int
    has_bias: bool
    has_silu: bool
    config: Config | None
    is_few: bool = False

    @property
    def tolerance(self) -> float:
        return 1e-6 + max(EPSILON[self.dtype], EPSILON[self.tail_dtype])

    def measure(self, problem: Problem | None = None) -> float:
        from hypic_kernels.conv import triton as kernel

        p = problem or Problem.random(
            (1,) * 5 if self.is_few else (5, 1, 0, 9, 2),
            num_channels=300,
            width=self.width,
            dtype=self.dtype,
            tail_dtype=self.tail_dtype,
            weight_dtype=self.weight_dtype,
            device=self.device,
        )
        out, scratch, tails = p.outputs()
        bias, layout = p.bias if self.has_bias else None, self.config or CANDIDATES[0]
        arguments = (p.x, tails, p.sources, p.weight, bias, self.has_silu, out, p.write_sources, p.write_slots, scratch)
        few = [kernel.convolve_few(*arguments[:-1])] if self.is_few else []
        for launch in few or kernel.convolve(*arguments, layout):
            launch.run()
        exact = p.solve(self.has_bias, self.has_silu)
        return max(map(relative_error, (out, tails), exact))
