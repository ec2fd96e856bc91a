"""Launches of this package to compile for chips that need not be here: its default layouts, or all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.decay import layout
from hypic_kernels.decay import stepping as stepping_kernel
from hypic_kernels.decay import triton as kernel
from hypic_kernels.decay.layout import default_precision
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.launch import Launch

HEAD_DIMS = ((128, 128), (64, 64), (96, 96), (128, 64), (256, 64))


def launches(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """Names and launches: bfloat16 tokens and heads of 128, or ``every`` size, type and layout."""
    dims, dtypes = (HEAD_DIMS, (torch.bfloat16, torch.float32)) if every else (HEAD_DIMS[:1], (torch.bfloat16,))
    for key_dim, value_dim in dims:
        for dtype in dtypes:
            for size in layout.CHUNK_SIZES if every else (16, 64):
                for has_norm in (True, False) if every else (True,):
                    yield from _of((key_dim, value_dim, size, dtype, has_norm), every)


def _of(case: tuple[int, int, int, torch.dtype, bool], every: bool) -> Iterator[tuple[str, Launch]]:
    key_dim, value_dim, size, dtype, has_norm = case
    shape = Shape(
        key_dim, value_dim, 2, 4, size, (size,), num_turned=key_dim // 4 * has_norm, silu=not has_norm,
        has_norm=has_norm,
    )  # fmt: skip
    p = Problem.random(shape, dtype=dtype)
    maps, pool, slots, stop = p.poisoned(), p.pool(), p.slots(), None if every else 1
    for lift in layout.lift_candidates(size, key_dim, value_dim)[:stop]:
        launch = kernel.lift(p.k, p.v, p.g, p.chunks, p.rule, maps, default_precision(dtype), lift)
        yield f"lift {case} {lift}", launch
    for read in layout.read_candidates(size, key_dim, value_dim)[:stop]:
        out = torch.empty_like(p.v, dtype=torch.float32)
        launch = kernel.read(*p.tokens, p.states, p.chunks, p.rule, out, default_precision(dtype), read)
        yield f"read {case} {read}", launch
    if size == 16:
        for step in layout.step_candidates(key_dim, value_dim)[:stop]:
            out = torch.empty_like(p.v, dtype=torch.float32)
            yield f"step {case} {step}", stepping_kernel.step(*p.tokens, pool, *slots, p.rule, out, step)
