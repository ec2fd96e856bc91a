"""The self-check at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hypic_kernels.attention.layout import Config, HeadDims
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.trust import relative_error

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of ``relative_error``, by the type that keys are stored in. What is right stays some three times below."""

WORK = (Work.last(331, 37), Work(150, ((0, 9), (90, 8), (140, 10))), Work(0, ()), Work.last(64, 1))
"""Whole blocks of keys and broken ones, rows within a chain and at its end, and nothing."""


@dataclass(frozen=True)
class Variant:
    """What decides which machine code runs."""

    device: torch.device
    dims: HeadDims
    num_key_heads: int
    dtype: torch.dtype
    query_dtype: torch.dtype
    out_dtype: torch.dtype
    tile: int
    is_split: bool
    is_moved: bool
    config: Config

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def measure(self) -> float:
        problem = Problem.random(
            self.dims,
            WORK,
            num_key_heads=self.num_key_heads,
            dtype=self.dtype,
            query_dtype=self.query_dtype,
            tile=self.tile,
            num_lanes=9 if self.is_split else 0,
            unit=64,
            is_moved=self.is_moved,
            spare=2,
            device=self.device,
        )
        return relative_error(problem.run(self.config, self.out_dtype), problem.solve())
