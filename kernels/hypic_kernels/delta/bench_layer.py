"""A warm layer in every way there is: dense maps of all chunks, or ``scan``; run by ``delta.bench --only layer``.

Rows of 8 tokens before 16 stored maps and one of 16 behind them: the chain of one request, 33 elements. Every way is
compared with the reference in float64, its final states and its outputs, before any of it is timed; then its launches
are timed one by one and together, with tokens, stored maps and states of their own for each repetition.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic_kernels.compose import Chains
from hypic_kernels.compose import triton as compose_kernel
from hypic_kernels.delta import reading as read_kernel
from hypic_kernels.delta import reference
from hypic_kernels.delta import scanning as scan_kernel
from hypic_kernels.delta import triton as lift_kernel
from hypic_kernels.delta.check import EPSILON
from hypic_kernels.delta.layout import (
    ScanConfig,
    default_precision,
    lift_config,
    read_config,
    read_precision,
    scan_candidates,
    solving_precision,
)
from hypic_kernels.delta.problem import Problem
from hypic_kernels.delta.rule import SCAN_TOLERANCE, ScanPrecision
from hypic_kernels.delta.walk import Walk
from hypic_kernels.timing import replayed_s
from hypic_kernels.trust import relative_error

NUM_SEGMENTS = 16
LENGTHS = (8,) * NUM_SEGMENTS + (16,)
Way = Callable[["Layer"], dict[str, Callable[[], None]]]


@dataclass(frozen=True)
class Layer:
    """One layer's inputs and buffers."""

    problem: Problem
    walk: Walk
    out: Tensor
    raw: Tensor
    before: Tensor
    final: Tensor

    @staticmethod
    def of(problem: Problem, num_segments: int, seed: int = 0) -> Layer:
        walk = Walk.warm(problem, num_segments, seed)
        before = torch.empty(len(problem.chunks), *walk.initial.shape[1:], device=walk.initial.device)
        raw = torch.empty(problem.v.shape, device=problem.v.device)
        return Layer(problem, walk, torch.empty_like(raw, dtype=problem.v.dtype), raw, before, before[:1].clone())

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.problem.chunks.shape[1], self.problem.k.shape[2], self.problem.v.shape[2]

    @property
    def num_bytes(self) -> int:
        """Each stored map, token and output once; the states at either end."""
        tensors = (
            *(self.walk.stored or ()),
            *self.problem.tokens,
            self.problem.norm.z,
            self.out,
            self.final,
            self.final,
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Outputs after the norm, and the final states."""
        out, _, final = self.walk.exact(self.problem)
        return reference.normed(out, self.problem.wide().norm), final[:1]

    def errors(self, exact: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"output_error": relative_error(self.out, exact[0]), "state_error": relative_error(self.final, exact[1])}

    def poison(self) -> None:
        for tensor in (self.out, self.raw, self.before, self.final):
            tensor.fill_(torch.nan)


def dense(layer: Layer) -> dict[str, Callable[[], None]]:
    """``lift``, ``compose``, ``read``, in the layouts that are the defaults."""
    p, walk, maps = layer.problem, layer.walk, layer.problem.poisoned()
    lift = lift_kernel.lift(*p.tokens, p.chunks, p.rule, maps, default_precision(p.v.dtype), lift_config(*layer.sizes))
    read = read_kernel.read(
        maps.query, maps.offset, layer.before, p.chunks, None, p.norm, layer.out, read_precision(p.v.dtype),
        read_config(*layer.sizes, True),
    )  # fmt: skip
    assert walk.stored is not None
    transitions, vectors = (maps.transition, walk.stored[0]), (maps.end_state, walk.stored[1])
    chains = _wanting(walk.chains)

    def compose() -> None:
        compose_kernel.compose(chains, transitions, vectors, walk.initial, layer.before, layer.final, "tf32x3")

    return {"lift": lift.run, "compose": compose, "read": read.run}


def _wanting(chains: Chains) -> Chains:
    """The same chain, asked for the state before every chunk."""
    source, transition, state = chains.elements[:, :3].unbind(1)
    wanted = torch.where(source == 0, state, -1)
    return Chains.of(
        chains.cu_elements, transition, state, chains.initial_index, source=source, out_index=wanted,
        device=source.device,
    )  # fmt: skip


def scanned(precision: ScanPrecision, config: ScanConfig) -> Way:
    """``solve``, ``scan``, ``norm``."""

    def way(layer: Layer) -> dict[str, Callable[[], None]]:
        p, walk = layer.problem, layer.walk
        solved = lift_kernel.solved_like(p.v, p.chunks)
        solve = lift_kernel.solve(
            p.q, p.k, p.g, p.beta, p.chunks, p.rule, solved, solving_precision(p.k.dtype, precision),
            lift_config(*layer.sizes),
        )  # fmt: skip
        scan = scan_kernel.scan(
            p.q, p.k, p.v, solved, p.chunks, walk.chains, walk.stored, walk.initial, layer.raw, layer.before,
            layer.final, None, precision, config,
        )  # fmt: skip
        return {
            "solve": solve.run,
            "scan": scan.run,
            "norm": scan_kernel.gated_norm(layer.raw, p.norm, layer.out).run,
        }

    return way


def measured(
    way: Way, layers: Sequence[Layer], exact: tuple[Tensor, Tensor], limit: float, repeats: int
) -> dict[str, Any]:
    """Errors after a first run; times only if they are small enough."""
    from triton.errors import TritonError

    try:
        launches = [way(layer) for layer in layers]
        layers[0].poison()
        for run in launches[0].values():
            run()
        errors = layers[0].errors(exact)
        allowed = {"state_error": limit, "output_error": limit + EPSILON[layers[0].out.dtype]}
        if not all(errors[name] <= allowed[name] for name in errors):
            return {**errors, "fault": f"wrong: more than {allowed}; not timed"}
        times = {f"{name}_s": replayed_s([own[name] for own in launches], repeats) for name in launches[0]}
        whole = replayed_s([run for own in launches for run in own.values()], repeats) * len(launches[0])
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}
    return {**errors, **times, "time_s": whole, "bytes_per_s": layers[0].num_bytes / whole}


def rows(
    problems: Sequence[Problem], repeats: int, precisions: Sequence[ScanPrecision], num_configs: int
) -> Iterator[dict[str, Any]]:
    """A row for dense maps, and one per precision and layout of the scan."""
    layers = [Layer.of(problem, NUM_SEGMENTS, seed) for seed, problem in enumerate(problems)]
    exact, (size, key_dim, value_dim) = layers[0].exact(), layers[0].sizes
    about = {
        "name": "layer", "case": "warm", "num_tokens": len(layers[0].out), "chunk": size, "bytes": layers[0].num_bytes
    }  # fmt: skip
    found = measured(dense, layers, exact, SCAN_TOLERANCE["tf32x3"], repeats)
    yield {**about, "way": "dense", "precision": "tf32x3", "config": {}, **found}
    for precision in precisions:
        for config in scan_candidates(key_dim, value_dim)[:num_configs]:
            found = measured(scanned(precision, config), layers, exact, SCAN_TOLERANCE[precision], repeats)
            yield {**about, "way": "scan", "precision": precision, "config": config._asdict(), **found}
