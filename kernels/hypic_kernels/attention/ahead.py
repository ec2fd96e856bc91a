"""Launches of this package to compile for chips that need not be here, in layouts that may be chosen there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.attention.layout import HEADS, TILES, layouts
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.launch import Launch


def launches(*, every: bool, room: int) -> Iterator[tuple[str, Launch]]:
    """Names and launches: heads of 64 and 256 in bfloat16 with one token a tile, or ``every`` head, type and layout."""
    from hypic_kernels.attention import launching as kernel

    dtypes = (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,)
    for name in HEADS if every else ("64", "256"):
        dims = HEADS[name]
        for dtype in dtypes:
            for config, tile in layouts(dims, dtype, room, TILES if every else TILES[:1]).items():
                p = Problem.random(
                    dims, (Work.last(8, 2),), num_key_heads=2 - dims.is_latent, dtype=dtype, tile=tile, num_lanes=2
                )
                parts = kernel.launches(*p.arguments, p.output(), dims, config)
                for number, launch in enumerate(parts):
                    yield f"{name} {dtype} {tuple(config)} {number}", launch
