"""Rows of one length laid end to end as flat tokens: what works across tokens (convolution, states, attention) is here.

Everything else in a model in training works on flat tokens, whose number stays the same at every stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic.engine.affine import Affine
from hypic.engine.layers.rotary import Angles

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHUNK = 64
Chunked = TypeVar("Chunked", bound="DataclassInstance")


@dataclass(frozen=True)
class Grid:
    """Where the flat tokens of a batch stand: ``rows`` rows of ``length`` tokens, ``N`` in all.

    ``history [W - 1, N, 1]`` is 0 where a token has no token ``i`` places before it in its row.
    """

    rows: int
    length: int
    history: Tensor
    angles: Angles


def shifted_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """The engine's ``causal_conv`` over many rows laid end to end, as a sum of shifted products: ``x [N, C]``."""
    width = weight.shape[-1]
    taps = weight[:, 0].to(x.dtype)
    out = x * taps[:, width - 1]
    for back in range(1, width):
        earlier = F.pad(x[:-back], (0, 0, back, 0))
        out = out + earlier * history[back - 1].to(x.dtype) * taps[:, width - 1 - back]
    return out


def chunked(x: Chunked) -> Chunked:
    """A family's inputs, ``[N, H, ...]`` to chunks ``[M, H, 64, ...]``."""
    return type(x)(**{f.name: getattr(x, f.name).unflatten(0, (-1, CHUNK)).transpose(1, 2) for f in fields(x)})


def carried(maps: Affine, rows: int) -> Tensor:
    """States before every chunk, carried along each row of chunks: ``[M, H, K, V]``."""
    steps = by_step(maps.transition, rows), by_step(maps.end_state, rows)
    state = torch.zeros_like(steps[1][0])
    before = []
    for transition, end_state in zip(*(part.unbind(0) for part in steps), strict=True):
        before.append(state)
        state = Affine(transition, end_state).apply(state)
    return torch.stack(before, dim=1).flatten(0, 1)


def by_step(chunks: Tensor, rows: int) -> Tensor:
    """``[rows * steps, ...]`` to ``[steps, rows, ...]``, contiguous."""
    return chunks.reshape(rows, -1, *chunks.shape[1:]).transpose(0, 1).contiguous()


def attended(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Causal attention within every row of flat ``[N, H, D]``."""
    q, k, v = (x.reshape(grid.rows, grid.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(0, 1)
