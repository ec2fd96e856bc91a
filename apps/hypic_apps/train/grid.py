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
from hypic_apps.train.streams import Streams, canonical_history, contextual, within

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHUNK = 64
Chunked = TypeVar("Chunked", bound="DataclassInstance")


@dataclass(frozen=True)
class Grid:
    """Where the flat tokens of a batch stand: ``rows`` rows of ``length`` tokens, ``N`` in all.

    ``history [W - 1, N, 1]`` is 0 where a token has no token ``i`` places before it in its row. With ``streams`` the
    canonical stream's rows come first, then the contextual stream's: twice as many rows.
    """

    rows: int
    length: int
    history: Tensor
    angles: Angles
    streams: Streams | None = None

    def doubled(self, marks: Tensor, dtype: torch.dtype) -> Grid:
        """The grid of both streams of rows with segments, by their ``marks [B, T]`` (``segments``)."""
        width, angles = len(self.history) + 1, self.angles
        history = torch.cat([canonical_history(marks.abs(), width), self.history], dim=1)
        twice = Angles(angles.cos.repeat(2, 1), angles.sin.repeat(2, 1))
        return Grid(2 * self.rows, self.length, history, twice, Streams.of(marks, dtype))


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
    """Causal attention within every row of flat ``[N, H, D]``, or that of both streams."""
    if grid.streams is None:
        return causal(q, k, v, grid.rows, grid.length)
    rows, interior = grid.rows // 2, grid.streams.interior
    (alone_q, own_q), alone_k, alone_v = q.chunk(2), k.chunk(2)[0], v.chunk(2)[0]
    alone = within(alone_q, alone_k, alone_v, grid.streams.visible, rows, grid.length)
    in_context = causal(own_q, contextual(k, interior), contextual(v, interior), rows, grid.length)
    return torch.cat([alone, in_context])


def causal(q: Tensor, k: Tensor, v: Tensor, rows: int, length: int) -> Tensor:
    """Causal attention within every row of flat ``[N, H, D]``."""
    q, k, v = (x.reshape(rows, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(0, 1)
