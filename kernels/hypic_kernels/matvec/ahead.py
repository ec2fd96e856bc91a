"""Launches of this package to compile for chips that need not be here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.launch import Launch
from hypic_kernels.matvec import triton as kernel
from hypic_kernels.matvec.layout import NORMED, PRODUCTS, of_type


def launches(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """Names and launches: rows of 2048 and 4096 in bfloat16, or ``every`` size and type."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,)
    for dtype in dtypes:
        for width in (512, 2048, 4096, 7000) if every else (2048, 4096):
            x, weight, out = (torch.zeros(2, size, dtype=dtype) for size in (width, width, 2))
            for row in PRODUCTS:
                yield f"product {width} {dtype}", kernel.product(x, weight, out, of_type(row.sizes, dtype))
            for row in NORMED:
                for residual in (None, x):
                    given = (x, residual, x[0], weight, 1e-6, True, out, x, x, of_type(row.sizes, dtype))
                    yield f"normed product {width} {dtype}", kernel.normed_product(*given)
