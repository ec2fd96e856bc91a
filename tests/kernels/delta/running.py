"""Rows that carry their state, as tests run them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hypic_kernels.delta import GatedNorm, run
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.rows import Rows


def problem_of(lengths: tuple[int, ...], *, is_raw: bool = True, heads: tuple[int, int] = (2, 4)) -> Problem:
    return Problem.random(Shape(24, 17, *heads, 64, lengths, 0), is_raw=is_raw)


def initial_of(p: Problem, num_rows: int) -> Tensor:
    return p.states[torch.arange(num_rows) % len(p.states)].contiguous()


def ran(p: Problem, rows: Rows, initial: Tensor, norm: GatedNorm | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Outputs of all tokens, final states, transitions; what is not written is NaN."""
    out = torch.full(p.v.shape, math.nan, dtype=p.v.dtype, device=p.v.device)
    return out, *run(*p.tokens, rows, initial, out, rule=p.rule, norm=norm, **options)
