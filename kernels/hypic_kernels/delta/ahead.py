"""Launches of this package to compile for chips that need not be here: its default layouts, or all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hypic_kernels.delta import carrying, gathering, layout, solving
from hypic_kernels.delta import reading as reading_kernel
from hypic_kernels.delta import scanning as scanning_kernel
from hypic_kernels.delta import stepping as stepping_kernel
from hypic_kernels.delta import triton as lifting_kernel
from hypic_kernels.delta.layout import default_precision, read_precision
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import SCAN_PRECISIONS
from hypic_kernels.delta.walk import Walk
from hypic_kernels.launch import SHARED_BYTES, Launch
from hypic_kernels.rows import Rows

HEAD_DIMS = ((128, 128), (64, 64), (96, 192), (192, 192), (256, 256))


class _Case(NamedTuple):
    size: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


def launches(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """Names and launches: chunks of 16 bfloat16 tokens, heads of 128, or ``every`` size, type and layout."""
    dims, dtypes = (HEAD_DIMS, (torch.bfloat16, torch.float32)) if every else (HEAD_DIMS[:1], (torch.bfloat16,))
    for key_dim, value_dim in dims:
        for dtype in dtypes:
            for size in layout.CHUNK_SIZES if every else layout.CHUNK_SIZES[:1]:
                yield from _of(_Case(size, key_dim, value_dim, dtype), every)


def _scans(p: Problem, case: _Case, every: bool) -> Iterator[tuple[str, Launch]]:
    walk, solved = Walk.random(p), lifting_kernel.solved_like(p.v, p.chunks)
    outputs = walk.outputs(torch.float32, torch.float32)
    for precision in SCAN_PRECISIONS[1:]:
        for config in layout.scan_candidates(case.key_dim, case.value_dim)[: None if every else 1]:
            if not layout.scan_fits(case.size, case.key_dim, config, precision, min(SHARED_BYTES.values())):
                continue
            walked = (p.chunks, walk.chains, walk.stored, walk.initial, *outputs, walk.final_slots)
            launch = scanning_kernel.scan(p.q, p.k, p.v, solved, *walked, precision, config)
            yield f"scan {case} {precision} {config}", launch
    yield f"gated_norm {case}", scanning_kernel.gated_norm(outputs[0], p.norm, p.v)


def _of(case: _Case, every: bool) -> Iterator[tuple[str, Launch]]:
    size, key_dim, value_dim, dtype = case
    p = Problem.random(Shape(key_dim, value_dim, 2, 4, size, lengths=(size,)), dtype=dtype)
    maps, pool, slots = p.poisoned(), p.pool(), p.slots()
    stop = None if every else 1
    for lift in layout.lift_candidates(size, key_dim, value_dim)[:stop]:
        solve, multiply = lifting_kernel.lift(*p.tokens, p.chunks, p.rule, maps, default_precision(dtype), lift)
        yield f"lift, solve {case} {lift}", solve
        yield f"lift, multiply {case} {lift}", multiply
    for read in layout.read_candidates(size, key_dim, value_dim, True)[:stop]:
        arguments = (maps.query, maps.offset, p.states, p.chunks, p.chunks[:, 0], p.norm, p.v)
        yield f"read {case} {read}", reading_kernel.read(*arguments, read_precision(dtype), read)
    yield from _scans(p, case, every)
    if size == 16:
        yield from _of_rows(p, case, every)
        for step in layout.step_candidates(key_dim, value_dim)[:stop]:
            yield f"step {case} {step}", stepping_kernel.step(*p.tokens, pool, *slots, p.rule, p.norm, p.v, step)


def _of_rows(p: Problem, case: _Case, every: bool) -> Iterator[tuple[str, Launch]]:
    """Rows that carry their state: what is made of tokens, the walk, and what is made of it."""
    q, k, v = (x[: case.size].contiguous() for x in (p.q, p.k, p.v))
    tokens, n, heads = p.chunks[0].contiguous(), case.size, p.v.shape[1]
    yield f"gather {case}", gathering.gather(p.q, tokens, q, 1e-6)
    gates = torch.empty((2, 1, n, heads))
    outputs = q, k, gates[0, 0], gates[1, 0]
    yield f"gather_all {case}", gathering.gather_all((p.q, p.k, p.g, p.beta), tokens, p.rule, outputs)
    rows, slots = Rows.of((n,), 1), torch.zeros(1, dtype=torch.int32)
    made = torch.empty((1, n, heads)), k.new_empty((1, n, heads, k.shape[2])), v[None]
    yield f"solve {case}", solving.solve(k[None], v, gates[0], gates[1], rows, *made)
    transitions = torch.empty((1, heads, k.shape[2], k.shape[2])), slots
    ends, kept = torch.zeros((1, 2), dtype=torch.int32), p.states[:1]
    yield f"settle {case}", carrying.settle(kept, transitions, ends, slots, (slots, slots), p.states)
    yield f"scatter {case}", gathering.scatter(v, tokens, p.norm, p.v)
    before = p.states.to(case.dtype)[:1, None]
    if case.dtype != torch.bfloat16:
        return
    for config in layout.carry_candidates(case.key_dim, min(SHARED_BYTES.values()))[: None if every else 1]:
        found = before, torch.empty_like(v[None]), kept
        launch = carrying.carry(k[None], made, rows, (p.states, slots), found, transitions, config=config)
        yield f"carry {case} {config}", launch
