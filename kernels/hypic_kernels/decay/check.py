"""The self-checks at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hypic_kernels.decay import reference
from hypic_kernels.decay.layout import LiftConfig, ReadConfig, StepConfig
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.decay.rule import TOLERANCE, Precision, Rule
from hypic_kernels.trust import relative_error

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""What rounding an output to its type adds to a relative error, at most."""


class Kind(NamedTuple):
    """Of tokens and of the layer's preparation: all that is compiled in but sizes of chunks and blocks."""

    device: torch.device
    dtype: torch.dtype
    group: int
    key_dim: int
    value_dim: int
    num_turned: int
    silu: bool
    has_norm: bool
    weight_dtype: torch.dtype

    @staticmethod
    def of(k: Tensor, v: Tensor, rule: Rule) -> Kind:
        weight_dtype = k.dtype if rule.k_weight is None else rule.k_weight.dtype
        group, has_norm = v.shape[1] // k.shape[1], rule.k_weight is not None
        sizes = (k.shape[2], v.shape[2], rule.num_turned)
        return Kind(v.device, v.dtype, group, *sizes, rule.silu, has_norm, weight_dtype)

    def problem(self, size: int) -> Problem:
        """Rows shorter and longer than a chunk, a chunk without a token."""
        shape = Shape(
            self.key_dim, self.value_dim, 2, 2 * self.group, size, (8, 1, 2 * size + 3),
            num_turned=self.num_turned, silu=self.silu, has_norm=self.has_norm, is_fixed=False,
        )  # fmt: skip
        return Problem.random(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class LiftVariant:
    kind: Kind
    size: int
    precision: Precision
    config: LiftConfig

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.precision]

    def measure(self) -> float:
        from hypic_kernels.decay import triton as kernel

        p = self.kind.problem(self.size)
        out = p.poisoned()
        kernel.lift(p.k, p.v, p.g, p.chunks, p.rule, out, self.precision, self.config).run()
        return max(map(relative_error, out, p.lifted()))


@dataclass(frozen=True)
class ReadVariant:
    kind: Kind
    out_dtype: torch.dtype
    size: int
    precision: Precision
    config: ReadConfig

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.precision] + EPSILON[self.out_dtype]

    def measure(self) -> float:
        from hypic_kernels.decay import triton as kernel

        p = self.kind.problem(self.size)
        out = torch.full_like(p.v, torch.nan, dtype=self.out_dtype)
        kernel.read(*p.tokens, p.states, p.chunks, p.rule, out, self.precision, self.config).run()
        wide = p.wide()
        return relative_error(out, reference.read(*wide.tokens, wide.states, p.chunks, wide.rule))


@dataclass(frozen=True)
class StepVariant:
    kind: Kind
    state_dtype: torch.dtype
    out_dtype: torch.dtype
    config: StepConfig

    @property
    def tolerance(self) -> float:
        return TOLERANCE["ieee"] + max(EPSILON[self.out_dtype], EPSILON[self.state_dtype])

    def measure(self) -> float:
        from hypic_kernels.decay import stepping as kernel

        p = self.kind.problem(16)
        pool, (reads, writes) = p.pool().to(self.state_dtype), p.slots()
        out, exact, wide = torch.full_like(p.v, torch.nan, dtype=self.out_dtype), pool.double(), p.wide()
        outputs, after = reference.step(*wide.tokens, exact, reads, wide.rule)
        exact[writes[writes >= 0].long()] = after[writes >= 0]
        kernel.step(*p.tokens, pool, reads, writes, p.rule, out, self.config).run()
        return max(relative_error(out, outputs), relative_error(pool, exact))
