"""A warm layer both ways: factors and one scan, or dense maps, ``compose`` and ``read``; run by ``delta.bench``.

Seams of 8 tokens, each before its stored map, and a tail: the chain of one request. Both ways are checked against the
reference in float64 before they are timed, with stored maps, states and projections of their own for each repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic_kernels.compose import NOT_WANTED, Chains
from hypic_kernels.compose import triton as compose_kernel
from hypic_kernels.delta import reading as read_kernel
from hypic_kernels.delta import reference
from hypic_kernels.delta import scanning as scan_kernel
from hypic_kernels.delta import triton as lift_kernel
from hypic_kernels.delta.layout import (
    LiftConfig,
    ScanConfig,
    default_precision,
    lift_candidates,
    lift_config,
    read_config,
    scan_candidates,
)
from hypic_kernels.delta.problem import Problem
from hypic_kernels.delta.rule import Precision
from hypic_kernels.launch import SHARED_BYTES

Timed = Callable[[Sequence[Callable[[], object]], Callable[[], float], float], dict[str, Any]]


def chain_of(num_segments: int, num_chunks: int, device: str, *, is_dense: bool) -> Chains:
    """A seam and its segment, in turn, then the tail; of dense chunks the states before them are wanted."""
    seams = [element for n in range(num_segments) for element in ((0, n, n), (1, n, n))]
    tail = [(0, n, n) for n in range(num_segments, num_chunks)]
    source, transition, state = zip(*seams, *tail, strict=True)
    wanted = [place if kind == 0 and is_dense else NOT_WANTED for kind, place in zip(source, state, strict=True)]
    return Chains.of([0, len(source)], transition, state, [0], source=source, out_index=wanted, device=device)


@dataclass(frozen=True)
class Layer:
    """One layer's inputs and buffers."""

    problem: Problem
    num_segments: int
    maps: tuple[Tensor, Tensor]
    raw: Tensor
    out: Tensor
    final: Tensor
    before: Tensor

    @staticmethod
    def of(problem: Problem, num_segments: int) -> Layer:
        _, heads, key_dim, value_dim = problem.states.shape
        device = problem.q.device
        transitions = torch.randn(num_segments, heads, key_dim, key_dim, device=device) * 0.9 / math.sqrt(key_dim)
        vectors = torch.randn(num_segments, heads, key_dim, value_dim, device=device)
        raw = torch.empty(problem.v.shape, device=device)
        before = torch.empty(len(problem.chunks), heads, key_dim, value_dim, device=device)
        return Layer(
            problem, num_segments, (transitions, vectors), raw, torch.empty_like(problem.v), before[:1].clone(), before
        )

    def chains(self, *, is_dense: bool) -> Chains:
        device = str(self.problem.q.device)
        return chain_of(self.num_segments, len(self.problem.chunks), device, is_dense=is_dense)

    def exact(self) -> Tensor:
        raw = torch.empty_like(self.raw, dtype=torch.float64)
        states = self.problem.states.double()
        arguments = self.problem.factored(), self.problem.chunks, self.maps, states, raw
        chains = self.chains(is_dense=False)
        reference.scan(chains, *arguments, self.before, self.final.double(), None)
        return reference.normed(raw, self.problem.wide().norm)

    def factored(self, precision: Precision, lift: LiftConfig, scan: ScanConfig) -> Callable[[], None]:
        p, factors = self.problem, self.problem.poisoned_factors()
        chains = self.chains(is_dense=False)
        launches = (
            lift_kernel.lift(*p.tokens, p.chunks, p.rule, factors, default_precision(p.v.dtype), lift),
            scan_kernel.scan(
                chains, factors, p.chunks, self.maps, p.states, self.raw, self.before, self.final, None, precision, scan
            ),
            scan_kernel.gated_norm(self.raw, p.norm, self.out),
        )

        def run() -> None:
            for launch in launches:
                launch.run()

        return run

    def dense(self, precision: Precision) -> Callable[[], None]:
        p, maps = self.problem, self.problem.poisoned()
        chains, (size, key_dim, value_dim) = self.chains(is_dense=True), (p.chunks.shape[1], *p.states.shape[2:])
        lift = lift_kernel.lift(
            *p.tokens, p.chunks, p.rule, maps, default_precision(p.v.dtype), lift_config(size, key_dim, value_dim)
        )
        config = read_config(size, key_dim, value_dim, True)
        read = read_kernel.read(maps[2], maps[3], self.before, p.chunks, None, p.norm, self.out, precision, config)
        transitions, vectors = (maps.transition, self.maps[0]), (maps.end_state, self.maps[1])

        def run() -> None:
            lift.run()
            compose_kernel.compose(chains, transitions, vectors, p.states, self.before, self.final, "tf32x3")
            read.run()

        return run


def rows(
    problems: list[Problem], num_segments: int, timed: Timed, precisions: Sequence[Precision] = ("tf32x3", "bf16x3")
) -> Iterator[dict[str, Any]]:
    """A row per layout of the scan and precision, and one of dense maps."""
    layers = [Layer.of(problem, num_segments) for problem in problems]
    exact, first = layers[0].exact(), layers[0]
    size, (key_dim, value_dim) = first.problem.chunks.shape[1], first.problem.states.shape[2:]
    num_bytes = sum(tensor.nbytes for tensor in (*first.maps, first.out, *first.problem.tokens[:3]))

    def error() -> float:
        difference = first.out.double() - exact
        return float(difference.norm() / exact.norm())

    about = {"case": "warm layer", "num_tokens": len(first.raw), "chunk": size, "bytes": num_bytes}
    yield {**about, "name": "dense", "precision": "tf32x3", "config": {},
           **timed([layer.dense("tf32x3") for layer in layers], error, 5e-3)}  # fmt: skip
    for precision in precisions:
        for scan in scan_candidates(size, key_dim, value_dim):
            if scan.shared_bytes(size, key_dim, value_dim) > SHARED_BYTES[90]:
                continue
            for lift in lift_candidates(size, key_dim, value_dim)[:1]:
                first.out.fill_(torch.nan)
                runs: list[Callable[[], object]] = [layer.factored(precision, lift, scan) for layer in layers]
                named = {**about, "name": "factored", "precision": precision, "config": scan._asdict()}
                yield {**named, **timed(runs, error, 5e-3)}
