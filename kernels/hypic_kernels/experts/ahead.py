"""Launches of this package to compile for chips that need not be here: products of experts, and what is around them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.experts import products, routing
from hypic_kernels.experts import triton as kernel
from hypic_kernels.experts.layout import LARGE, MANY_ROWS_PER_EXPERT, Kind, is_many, layouts
from hypic_kernels.launch import Launch

KINDS: tuple[Kind, ...] = ("silu", "relu2", "none")


def launches(*, every: bool, room: int) -> Iterator[tuple[str, Launch]]:
    """Names and launches: bfloat16 and widths of whole blocks, or ``every`` type and widths that are not."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,)
    chosen, ends = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    for launch in kernel.order(chosen, chosen.view(-1), chosen, ends):
        yield "order", launch
    for dtype in dtypes:
        x = torch.zeros(4, 256, dtype=dtype)
        yield f"route {dtype}", kernel.route(x[:, :9].contiguous(), x[:, :8].float(), chosen, True)
        logits, weights = x.float(), x[:, :8].float()
        groups = routing.route_groups(logits, logits[0], 8, 4, 2.5, True, weights, chosen)
        yield f"route_groups {dtype}", groups
        for launch in kernel.scatter(x, chosen, x.new_zeros(32, 256), chosen, ends, ends):
            yield f"scatter {dtype}", launch
        rows = x.new_zeros(32, 256)
        yield f"combine {dtype}", kernel.combine(rows, chosen, x[:, :8].float().contiguous(), x, x, x[0], x)
        for width in (256, 250) if every else (256,):
            yield from _products(dtype, width, every, room)


def _products(dtype: torch.dtype, width: int, every: bool, room: int) -> Iterator[tuple[str, Launch]]:
    ends, tokens = torch.zeros(9, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    for kind in KINDS if every else KINDS[::2]:
        large = [LARGE] if is_many(MANY_ROWS_PER_EXPERT, 1, kind, dtype, room) else []
        for layout in [*layouts(kind, dtype), *large]:
            x, out = torch.zeros(32, width, dtype=dtype), torch.zeros(32, 64, dtype=dtype)
            weight = torch.zeros(9, 128 if kind == "silu" else 64, width, dtype=dtype)
            for index in (None,) if kind == "none" else (None, tokens) if every else (tokens,):
                launch = products.multiply(x, weight, ends, index, kind, out, layout)
                yield f"multiply {kind} {dtype} {width} {layout}", launch
