"""Launches of this package to compile for chips that need not be here, in layouts that may be chosen there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.attention.layout import HEADS, TILES, Chip, layouts
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.launch import Launch


def chip_of(capability: int, room: int) -> Chip:
    return Chip(shared_bytes=room, runs_hopper=capability == 90)


def launches(*, every: bool, chip: Chip) -> Iterator[tuple[str, Launch]]:
    """Names and launches: heads of 64 and 256 in bfloat16, tiles of 1 and 64; or ``every`` head, type, layout."""
    from hypic_kernels.attention import launching as kernel

    dtypes = (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,)
    for name in HEADS if every else ("64", "256"):
        dims = HEADS[name]
        for dtype in dtypes:
            for config, tile in layouts(dims, dtype, chip, TILES if every else TILES[::3]).items():
                p = Problem.random(
                    dims, (Work.last(40, 2),), num_key_heads=2 - dims.is_latent, dtype=dtype, tile=tile, num_lanes=8
                )
                parts = kernel.launches(*p.arguments, p.output(), dims, config)
                for number, launch in enumerate(parts):
                    yield f"{name} {dtype} {tuple(config)} {number}", launch
