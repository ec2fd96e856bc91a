"""Launches of this package to compile for chips that need not be here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.launch import Launch
from hypic_kernels.pointwise import heading
from hypic_kernels.pointwise import triton as kernel


def launches(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """Names and launches: rows of 2048 in bfloat16, or ``every`` size of common models and float32 too."""
    sizes, dtypes = (
        ((2048,), (torch.bfloat16,)) if not every else ((512, 2048, 3840, 9216), (torch.bfloat16, torch.float32))
    )
    for size in sizes:
        for dtype in dtypes:
            x, weight = torch.zeros(4, size, dtype=dtype), torch.zeros(size, dtype=dtype)
            for residual in (None, x):
                yield f"add_rms_norm {size} {dtype}", kernel.add_rms_norm(x, residual, weight, 1e-6, True, x, x)
            yield f"silu_mul {size} {dtype}", kernel.silu_mul(x, x, x)
            yield (
                f"gated_group_norm {size} {dtype}",
                heading.gated_group_norm(x.float(), x, weight, 1, 1e-6, False, False, x),
            )
    for width in (128,) if not every else (64, 80, 128, 256):
        for dtype in dtypes:
            x, weight, cos = torch.zeros(4, 6, width, dtype=dtype), torch.zeros(width, dtype=dtype), torch.zeros(4, 32)
            yield f"norm of heads {width} {dtype}", heading.heads(x, weight, 1e-6, True, None, None, x)
            yield f"rotation of heads {width} {dtype}", heading.heads(x, None, 0.0, False, cos, cos, x)
