"""The self-checks at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hypic_kernels.delta import reference
from hypic_kernels.delta.layout import (
    LiftConfig,
    ReadConfig,
    ScanConfig,
    StepConfig,
    lift_config,
    solving_precision,
)
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import SCAN_TOLERANCE, TOLERANCE, GatedNorm, Precision, Rule, ScanPrecision
from hypic_kernels.delta.walk import Walk
from hypic_kernels.rows import Rows
from hypic_kernels.trust import relative_error

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""What rounding an output to its type adds to a relative error, at most."""


@dataclass(frozen=True)
class LiftVariant:
    device: torch.device
    dtype: torch.dtype
    size: int
    group: int
    key_dim: int
    value_dim: int
    is_raw: bool
    precision: Precision
    config: LiftConfig

    @staticmethod
    def of(q: Tensor, v: Tensor, chunks: Tensor, rule: Rule, precision: Precision, config: LiftConfig) -> LiftVariant:
        group, is_raw = v.shape[1] // q.shape[1], rule.A_log is not None
        return LiftVariant(v.device, v.dtype, chunks.shape[1], group, q.shape[2], v.shape[2], is_raw, precision, config)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.precision]

    def measure(self) -> float:
        from hypic_kernels.delta import triton as kernel

        problem = _problem(self.device, self.dtype, self.size, self.group, self.key_dim, self.value_dim, self.is_raw)
        out = problem.poisoned()
        kernel.lift(*problem.tokens, problem.chunks, problem.rule, out, self.precision, self.config).run()
        return max(map(relative_error, out, problem.lifted()))


@dataclass(frozen=True)
class ReadVariant:
    device: torch.device
    out_dtype: torch.dtype
    state_dtype: torch.dtype
    size: int
    key_dim: int
    value_dim: int
    has_norm: bool
    precision: Precision
    config: ReadConfig

    @staticmethod
    def of(
        query: Tensor,
        offset: Tensor,
        states: Tensor,
        out: Tensor,
        norm: GatedNorm | None,
        precision: Precision,
        config: ReadConfig,
    ) -> ReadVariant:
        size, key_dim, value_dim, has_norm = query.shape[2], query.shape[3], offset.shape[3], norm is not None
        dtypes = out.dtype, states.dtype
        return ReadVariant(out.device, *dtypes, size, key_dim, value_dim, has_norm, precision, config)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.precision] + EPSILON[self.out_dtype]

    def measure(self) -> float:
        from hypic_kernels.delta import reading as kernel

        problem = _problem(self.device, self.out_dtype, self.size, 1, self.key_dim, self.value_dim, True)
        maps = problem.lifted()
        norm = problem.norm if self.has_norm else None
        places = torch.arange(len(maps.query), dtype=torch.int32, device=self.device) % 6 - 1
        states = problem.states.to(self.state_dtype)
        out = torch.full_like(problem.v, torch.nan, dtype=self.out_dtype)
        query, offset = maps.query.float().contiguous(), maps.offset.float().contiguous()
        kernel.read(query, offset, states, problem.chunks, places, norm, out, self.precision, self.config).run()
        plain = reference.read(query.double(), offset.double(), states, problem.chunks, places, len(out))
        return relative_error(out, reference.normed(plain, norm))


@dataclass(frozen=True)
class StepVariant:
    device: torch.device
    dtype: torch.dtype
    state_dtype: torch.dtype
    out_dtype: torch.dtype
    group: int
    key_dim: int
    value_dim: int
    is_raw: bool
    has_norm: bool
    config: StepConfig

    @staticmethod
    def of(
        q: Tensor, v: Tensor, states: Tensor, out: Tensor, rule: Rule, norm: GatedNorm | None, config: StepConfig
    ) -> StepVariant:
        sizes = v.shape[1] // q.shape[1], q.shape[2], v.shape[2]
        return StepVariant(
            v.device, v.dtype, states.dtype, out.dtype, *sizes, rule.A_log is not None, norm is not None, config
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCE["ieee"] + max(EPSILON[self.out_dtype], EPSILON[self.state_dtype])

    def measure(self) -> float:
        from hypic_kernels.delta import stepping as kernel

        problem = _problem(self.device, self.dtype, 16, self.group, self.key_dim, self.value_dim, self.is_raw)
        norm = problem.norm if self.has_norm else None
        pool, (reads, writes) = problem.pool().to(self.state_dtype), problem.slots()
        out = torch.full_like(problem.v, torch.nan, dtype=self.out_dtype)
        exact = pool.double()
        outputs, after = reference.step(*problem.wide().tokens, exact, reads, problem.rule)
        exact[writes[writes >= 0].long()] = after[writes >= 0]
        kernel.step(*problem.tokens, pool, reads, writes, problem.rule, norm, out, self.config).run()
        return max(relative_error(out, reference.normed(outputs, norm)), relative_error(pool, exact))


@dataclass(frozen=True)
class RunVariant:
    """Numbers of heads are compiled in, so the check has the layer's own."""

    device: torch.device
    dtype: torch.dtype
    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    is_raw: bool
    has_norm: bool

    LENGTHS = (130, 64, 1, 37)
    # Places of the first row: a chunk of 8 tokens, then chunks of which the transition is wanted.
    TOKENS = (*range(8), *[-1] * 56, *range(8, 130))

    @property
    def tolerance(self) -> float:
        return TOLERANCE["bf16"]

    def measure(self) -> float:
        """Rows of which only ends are wanted, by fla, and rows that are kept in parts."""
        problem = self._problem()
        wide, norm = problem.wide(), problem.norm if self.has_norm else None
        worst = 0.0
        for rows in (Rows.of(self.LENGTHS, 0, self.device), self._in_parts()):
            initial = problem.states[: rows.num_rows].contiguous()
            plain, *exact = reference.run(*wide.tokens, rows, initial.double(), wide.rule)
            picked = None if norm is None else replace(wide.norm, z=wide.norm.z[rows.tokens[rows.tokens >= 0].long()])
            results = self._ran(problem, rows, initial, norm)
            exact = [reference.normed(plain, picked), *exact]
            worst = max(worst, *(relative_error(*pair) for pair in zip(results, exact, strict=True) if len(pair[0])))
        return worst

    def _problem(self) -> Problem:
        shape = Shape(self.key_dim, self.value_dim, self.num_k_heads, self.num_v_heads, 64, self.LENGTHS, 0)
        return Problem.random(shape, dtype=self.dtype, is_raw=self.is_raw, device=self.device)

    def _in_parts(self) -> Rows:
        rest = range(130, sum(self.LENGTHS))
        lengths = (len(self.TOKENS), *self.LENGTHS[1:])
        return Rows.of(lengths, 0, self.device, folds=[(1, 3), (3, 4)], marks={1: 0}, tokens=[*self.TOKENS, *rest])

    def _ran(self, problem: Problem, rows: Rows, initial: Tensor, norm: GatedNorm | None) -> tuple[Tensor, ...]:
        """Outputs, states and transitions."""
        from hypic_kernels.delta import chunked

        slots = torch.arange(rows.num_rows, dtype=torch.int32, device=self.device)
        out = torch.full_like(problem.v, torch.nan, memory_format=torch.contiguous_format)
        return out, *chunked.run(*problem.tokens, rows, (initial, slots), problem.rule, norm, out)


@dataclass(frozen=True)
class SettleVariant:
    device: torch.device
    state_dtype: torch.dtype
    key_dim: int
    value_dim: int

    @staticmethod
    def of(kept: Tensor, states: Tensor) -> SettleVariant:
        return SettleVariant(kept.device, states.dtype, *kept.shape[2:])

    @property
    def tolerance(self) -> float:
        return TOLERANCE["tf32x3"] + EPSILON[self.state_dtype]

    def measure(self) -> float:
        from hypic_kernels.delta import carrying

        draw = torch.Generator().manual_seed(0)
        kept = torch.randn((4, 2, self.key_dim, self.value_dim), generator=draw)
        transitions = torch.randn((3, 2, self.key_dim, self.key_dim), generator=draw)
        lists = [2, 0], [[0, 3], [1, 2]], [1, 5], [3, 0], [4, 2]
        slots, ends, fold_slots, *writes = (torch.tensor(x, dtype=torch.int32, device=self.device) for x in lists)
        states = torch.full((6, *kept.shape[1:]), torch.nan, dtype=self.state_dtype, device=self.device)
        exact = states.double()
        given = kept.to(self.device), (transitions.to(self.device), slots), ends, fold_slots, (writes[0], writes[1])
        reference.settle(given[0].double(), (given[1][0].double(), slots), *given[2:], exact)
        carrying.settle(*given, states).run()
        return relative_error(states, exact)


@dataclass(frozen=True)
class ScanVariant:
    """``map_dtypes`` of stored transitions and end states; empty if there are none."""

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    map_dtypes: tuple[torch.dtype, ...]
    state_dtype: torch.dtype
    size: int
    group: int
    key_dim: int
    value_dim: int
    is_raw: bool
    precision: ScanPrecision
    config: ScanConfig

    @property
    def tolerance(self) -> float:
        return SCAN_TOLERANCE[self.precision] + max(EPSILON[self.out_dtype], EPSILON[self.state_dtype])

    def measure(self) -> float:
        from hypic_kernels.delta import scanning as kernel
        from hypic_kernels.delta import triton as solver

        p = _problem(self.device, self.dtype, self.size, self.group, self.key_dim, self.value_dim, self.is_raw)
        walk = Walk.random(p, self.map_dtypes, self.state_dtype)
        found, solved = walk.outputs(self.out_dtype, self.state_dtype), solver.solved_like(p.v, p.chunks)
        config = lift_config(self.size, self.key_dim, self.value_dim)
        precision = solving_precision(self.dtype, self.precision)
        solver.solve(p.q, p.k, p.g, p.beta, p.chunks, p.rule, solved, precision, config).run()
        kernel.scan(
            p.q, p.k, p.v, solved, p.chunks, walk.chains, walk.stored, walk.initial, *found, walk.final_slots,
            self.precision, self.config,
        ).run()  # fmt: skip
        return max(map(relative_error, found, walk.exact(p)))


@dataclass(frozen=True)
class NormVariant:
    device: torch.device
    dtype: torch.dtype
    z_dtype: torch.dtype
    out_dtype: torch.dtype
    value_dim: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE["ieee"] + EPSILON[self.out_dtype]

    def measure(self) -> float:
        from hypic_kernels.delta import scanning as kernel

        p = _problem(self.device, torch.float32, 16, 1, 16, self.value_dim, True)
        x, norm = p.v.to(self.dtype), replace(p.norm, z=p.norm.z.to(self.z_dtype))
        out = torch.full_like(p.v, torch.nan, dtype=self.out_dtype)
        kernel.gated_norm(x, norm, out).run()
        wide = replace(norm, z=norm.z.double(), weight=norm.weight.double())
        return relative_error(out, reference.normed(x.double(), wide))


def _problem(
    device: torch.device, dtype: torch.dtype, size: int, group: int, key_dim: int, value_dim: int, is_raw: bool
) -> Problem:
    shape = Shape(key_dim, value_dim, 2, 2 * group, size, lengths=(8, 1, 2 * size + 3))
    problem = Problem.random(shape, dtype=dtype, is_raw=is_raw, device=device)
    return replace(problem, norm=replace(problem.norm, eps=1e-5))
