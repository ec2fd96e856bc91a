"""Two streams of hidden states over the same rows: the forward through segments, differentiable as a whole.

The canonical stream runs every segment alone: zero state, no convolution history, attention within the segment. The
contextual stream runs the rows' live tokens and seams in context; what it knows of interiors is what the canonical
stream gives: a linear layer's raw inputs, with the keys, values and gates made of them, and attention's keys and
values. The scan over a whole row is then the composition of transitions that the engine does, and a position's angle
serves both streams, since attention knows distances alone. Both streams lie end to end as flat tokens ``[2 N]``,
canonical ones first.

Tuning a model so that it answers from passages that were encoded apart is due to Block-Attention (arXiv 2409.15355),
for models of full attention; here recurrent states are reused too, and what is trained is what the engine computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic.engine.layers.gated_delta_net import Projected
from hypic_apps.train.segments import LONGEST


@dataclass(frozen=True)
class Streams:
    """What tells two streams of ``N`` tokens apart.

    ``interior [N, 1]`` is true inside of segments. ``resets [2 N, 1]`` is added to log decays: it empties the states
    before a canonical segment. ``visible [M, 1, C, D]`` says for blocks of ``C`` tokens which of ``D`` keys the
    canonical stream attends to: the block's own, and the block's before it if rows have several.
    """

    interior: Tensor
    resets: Tensor
    visible: Tensor

    @classmethod
    def of(cls, marks: Tensor, dtype: torch.dtype) -> Streams:
        """The streams of ``marks [B, T]`` (``segments``) for log decays of a type."""
        owner = marks.abs()
        begins = (owner != earlier(owner, 1)) & (owner > 0)
        # A little below the type's precision. It is no more than that, since running sums of log decays lose what
        # they are large by; sums only fall, so that nothing overflows however many segments begin in a chunk.
        emptied = begins.flatten()[:, None].to(dtype) * (1.25 * math.log(torch.finfo(dtype).eps))
        resets = torch.cat([emptied, torch.zeros_like(emptied)])
        return cls((marks > 0).flatten()[:, None], resets, visible(owner))


def earlier(owner: Tensor, back: int) -> Tensor:
    """The owners ``[B, T]`` of the tokens ``back`` places before, -1 where a row has none."""
    return F.pad(owner[:, :-back], (back, 0), value=-1)


def canonical_history(owner: Tensor, width: int) -> Tensor:
    """``Grid.history`` of the canonical stream: a segment's tokens see none before it. ``[width - 1, N, 1]``"""
    seen = [(earlier(owner, back) == owner).flatten() for back in range(1, width)]
    return torch.stack(seen).float()[..., None]


def visible(owner: Tensor) -> Tensor:
    """Which keys the canonical stream's queries attend to: earlier ones of their own segment; see ``Streams``."""
    rows, length = owner.shape
    size = block_size(length)
    queries, keys = owner.reshape(-1, size), with_previous(owner.flatten(), rows, length, -1)
    own = torch.ones(size, keys.shape[1], dtype=torch.bool, device=owner.device)
    causal = own.tril(keys.shape[1] - size)
    return ((queries[:, :, None] == keys[:, None]) & causal)[:, None]


def block_size(length: int) -> int:
    """Tokens a block of canonical attention in rows of ``length``; no segment reaches over more than two blocks."""
    return LONGEST if length % LONGEST == 0 else length


def with_previous(x: Tensor, rows: int, length: int, filled: float = 0.0) -> Tensor:
    """Blocks of flat tokens ``[N, ...]``, each behind the block before it: ``[M, 2 size, ...]``; where a row is one
    block, ``[M, size, ...]``. What would stand before a row is ``filled`` in."""
    blocks = x.reshape(rows, -1, block_size(length), *x.shape[1:])
    if blocks.shape[1] == 1:
        return blocks[:, 0]
    before = torch.cat([torch.full_like(blocks[:, :1], filled), blocks[:, :-1]], dim=1)
    return torch.cat([before, blocks], dim=2).flatten(0, 1)


def within(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, rows: int, length: int) -> Tensor:
    """The canonical stream's attention, flat ``[N, H, D]``."""
    queries = q.reshape(-1, visible.shape[2], *q.shape[1:]).transpose(1, 2)
    keys, values = (with_previous(x, rows, length).transpose(1, 2) for x in (k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(0, 1)


def with_interiors(both: Tensor, interior: Tensor) -> Tensor:
    """Flat ``[2 N, ...]`` of both streams, the contextual one's interiors taken from the canonical stream."""
    return torch.cat([both[: len(interior)], contextual(both, interior)])


def contextual(both: Tensor, interior: Tensor) -> Tensor:
    """``[N, ...]`` of the contextual stream, its interiors from the canonical one."""
    canonical, own = both.chunk(2)
    return torch.where(interior.view(-1, *[1] * (own.ndim - 1)), canonical, own)


def raw_of_both(projected: Projected, interior: Tensor) -> Projected:
    """What goes into the convolution and the gates: a row behind an interior sees its canonical raw inputs."""
    mixed, b, a = (with_interiors(x, interior) for x in (projected.mixed, projected.b, projected.a))
    return replace(projected, mixed=mixed, b=b, a=a)
