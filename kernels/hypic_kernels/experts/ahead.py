"""Launches of this package to compile for chips that need not be here: products of experts, and what is around them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hypic_kernels.experts import pairs, products, routing
from hypic_kernels.experts import triton as kernel
from hypic_kernels.experts.layout import (
    FEW,
    LARGE,
    MANY_ROWS_PER_EXPERT,
    Kind,
    Shared,
    few_of_type,
    is_many,
    layouts,
)
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
            yield from _few(dtype, 2048 if width == 256 else width, every)


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


def _few(dtype: torch.dtype, width: int, every: bool) -> Iterator[tuple[str, Launch]]:
    x, chosen, inner = torch.zeros(2, width, dtype=dtype), torch.zeros(2, 8, dtype=torch.int32), 2 * width // 8
    weights, shared_inner = torch.zeros(2, 8), width // 4
    first, down = x.new_zeros(shared_inner, width), x.new_zeros(width, shared_inner)
    shared, logits = Shared(first, first, down, x[0]), weights.new_zeros(2, 256)
    hidden = x.new_zeros(2, 8 * inner + shared_inner)
    for kind in KINDS[:2] if every else KINDS[:1]:
        matrix, back = x.new_zeros(9, inner * (2 if kind == "silu" else 1), width), x.new_zeros(9, width, inner)
        for _, *sizes in FEW:
            one, two = (few_of_type(each, dtype) for each in sizes)
            for scores in (logits, None) if every else (logits,):
                given = (x, scores, weights, chosen, matrix, shared, kind, weights[0], hidden)
                yield f"few in {kind} {dtype} {width} {one}", pairs.into(*given, one)
                summed = (hidden, weights, chosen, back, shared, weights[0], scores is not None, x, x)
                yield f"few back {kind} {dtype} {width} {two}", pairs.back(*summed, two)
