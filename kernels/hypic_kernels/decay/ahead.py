"""Launches of this package to compile for chips that need not be here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.decay import triton as kernel
from hypic_kernels.decay.check import Precision, Problem
from hypic_kernels.launch import Launch

HEAD_DIMS = ((128, 128), (128, 64), (64, 64), (256, 64), (96, 96))


def launches(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """Names and launches: heads of 128 in float32, or ``every`` size, type and precision."""
    precisions: tuple[Precision, ...] = ("tf32x3", "bf16x3", "ieee") if every else ("tf32x3",)
    types = (torch.float32, torch.bfloat16) if every else (torch.float32,)
    for dims in HEAD_DIMS if every else HEAD_DIMS[:1]:
        for dtype in types:
            for precision in precisions:
                problem = Problem.random(dims, dtypes=(dtype, dtype))
                walk, read, *_ = kernel.launches(*problem, torch.empty_like(problem.v), precision)
                yield f"walk {dims} {dtype} {precision}", walk
                yield f"read {dims} {dtype} {precision}", read
