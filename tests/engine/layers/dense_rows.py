"""Rows that are run whole, as tests draw them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hypic.engine.layers import dense
from hypic.engine.layers.dense import UNIT, Heads, Way

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = (torch.float16, torch.bfloat16)
SMALL = Heads(CPU, torch.float64, 2, 1, 8)
LIMIT = 1e-13
# Around the multiples that rows are filled up to.
LENGTHS = [UNIT - 1, UNIT, UNIT + 1, 2 * UNIT - 3]
# Heads, key heads, head size and scale.
KINDS = [(8, 8, 64, None), (16, 2, 256, None), (6, 2, 96, 0.05)]


def drawn(heads: Heads, length: int, seed: int = 0) -> list[Tensor]:
    """``q, k, v [T, H, D]``."""
    draw = torch.Generator(heads.device).manual_seed(seed)
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    made = [torch.randn(length, n, heads.head_dim, generator=draw, device=heads.device) for n in counts]
    return [x.to(heads.dtype) for x in made]


def exactly(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """One row in float64, ``[T, H, D]``."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense.exact(q, k, v, scale)[0].transpose(0, 1)


def always(way: Way) -> Callable[[Heads, int], Way]:
    return lambda heads, length: way


def spans_of(lengths: Sequence[int], first: int = 0) -> list[slice]:
    ends = [first + sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def noted_shapes(patch: pytest.MonkeyPatch) -> set[Hashable]:
    """Shapes and strides that attention is asked for from now on, with plans for every 16 tokens from 32 on."""
    seen, whole = set[Hashable](), dense.whole

    def noted(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        seen.add(tuple((x.shape, x.stride()) for x in (q, k, v)))
        return whole(q, k, v, scale)

    patch.setattr(dense, "whole", noted)
    patch.setattr(dense, "UNIT", 16)
    patch.setattr(dense, "PLANNED_FROM", 32)
    patch.setattr(dense, "tried", lambda way, heads: "planned")
    return seen
