"""Launches of this package to compile for chips that need not be here: its default layout, or all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.conv import triton as kernel
from hypic_kernels.conv.problem import Problem
from hypic_kernels.conv.sources import CANDIDATES
from hypic_kernels.launch import Launch


def launches(*, every: bool) -> Iterator[tuple[str, Launch]]:
    """Names and launches: widths of 4 in bfloat16, tails in it or in float32; ``every`` layout, width and type."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [(bf16, bf16, 4), (bf16, fp32, 4)] + ([(fp32, fp32, 4), (bf16, bf16, 3)] if every else [])
    for dtype, kept, width in cases:
        p = Problem.random(num_channels=512, width=width, dtype=dtype, tail_dtype=kept)
        out, scratch, tails = p.outputs()
        few = kernel.convolve_few(p.x, tails, p.sources, p.weight, p.bias, True, out, p.write_sources, p.write_slots)
        yield f"convolve few {dtype} {kept} {width}", few
        for config in CANDIDATES if every else CANDIDATES[:1]:
            tables = (p.write_sources, p.write_slots, scratch)
            pair = kernel.convolve(p.x, tails, p.sources, p.weight, p.bias, True, out, *tables, config)
            for name, launch in zip(("convolve", "put"), pair, strict=True):
                yield f"{name} {dtype} {kept} {width} {config}", launch
