"""Gated linear attention with one gate per key channel (GLA, arXiv 2312.06635).

``S_t = diag(a_t) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t``, with ``a_t = exp(g_t)`` per channel and ``g_t <= 0``.
A state behind such a gate cannot be moved by rotation: the gate does not commute with it.

Within a chunk the scores are ``sum_d q_id k_jd e^(G_id - G_jd)``. Splitting the exponential into a factor of ``i`` and
one of ``j`` overflows for strong gates, so the triangle is halved again and again: for tokens of a later and an earlier
half the border between them splits the exponent into two sums of gates, both at most zero, and one matrix product is
left; triangles of two tokens are written out. Every sum of gates begins at its own border, so that none is a
difference of large numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic.engine.affine import Affine
from hypic.engine.linear import Lifted

SMALLEST = 2


@dataclass(frozen=True)
class GLAInputs:
    """``q, k, g [M, H, C, K]``, ``v [M, H, C, V]``; one token per row: without ``C``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class GLA:
    """The family: diagonal transitions ``[H, K]``."""

    has_channel_gate = True

    def lift(self, x: GLAInputs) -> Lifted:
        running = x.g.cumsum(-2)
        offset = decayed_scores(x.q, x.k, x.g) @ x.v
        carried = (x.k * gates_after(x.g).exp()).mT @ x.v
        return Lifted(Affine(running[..., -1, :].exp(), carried), x.q * running.exp(), offset)

    def step(self, x: GLAInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * x.g.exp()[..., None] + x.k[..., :, None] * x.v[..., None, :]
        return (x.q[..., None, :] @ state)[..., 0, :], state


def gates_after(g: Tensor) -> Tensor:
    """The sum of the gates behind every token, ``[..., C, K]``: what its key decays by until the chunk's end."""
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2)


def decayed_scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """``sum_d q_id k_jd e^(g_{j+1,d} + ... + g_id)`` for ``j <= i``, else 0.

    ``k, g`` are ``[..., C, K]``, ``q`` may have more axes before; the result is ``[..., C, C]``.
    """
    size = q.shape[-2]
    padded = SMALLEST
    while padded < size:
        padded *= 2
    q, k, g = (F.pad(x, (0, 0, 0, padded - size)) for x in (q, k, g))
    scores = q.new_zeros((*q.shape[:-1], padded))
    _diagonal(scores, SMALLEST).copy_(_written_out(q, k, g).movedim(-3, -1))
    half = SMALLEST
    while half < padded:
        corner = _diagonal(scores, 2 * half)[..., half:, :half, :]
        corner.copy_(_between_halves(q, k, g, half).movedim(-3, -1))
        half *= 2
    return scores[..., :size, :size]


def _diagonal(scores: Tensor, size: int) -> Tensor:
    """A view of the square blocks on the diagonal: ``[..., size, size, number of blocks]``."""
    blocks = torch.unflatten(torch.unflatten(scores, -1, (-1, size)), -3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2)


def _written_out(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The smallest triangles, ``[..., blocks, SMALLEST, SMALLEST]``, channel by channel."""
    q, k, g = (torch.unflatten(x, -2, (-1, SMALLEST)) for x in (q, k, g))
    running = g.cumsum(-2)
    difference = running[..., :, None, :] - running[..., None, :, :]
    above = torch.ones(SMALLEST, SMALLEST, dtype=torch.bool, device=g.device).triu(1)
    decay = difference.masked_fill(above[..., None], float("-inf")).exp()
    return (q[..., :, None, :] * (k[..., None, :, :] * decay)).sum(-1)


def _between_halves(q: Tensor, k: Tensor, g: Tensor, half: int) -> Tensor:
    """Queries of every second half against keys of the half before it: ``[..., blocks, half, half]``."""
    q, k, g = (torch.unflatten(x, -2, (-1, 2, half)) for x in (q, k, g))
    later = q[..., 1, :, :] * g[..., 1, :, :].cumsum(-2).exp()
    earlier = k[..., 0, :, :] * gates_after(g[..., 0, :, :]).exp()
    return later @ earlier.mT
