"""Interiors of the gated delta rule, folded into their entries from chunks that are kept in factors.

A chain's product is walked twice: from the identity, with nothing added, which gives ``T``, and from zero, which gives
``B``. No chunk's own map is ever written out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.kernel_plan import Folds
from hypic.engine.pool import Pool
from hypic_kernels import delta


def write(factors: delta.Factors, chunks: Tensor, folds: Folds, pool: Pool, layer: int) -> None:
    """Write transitions and end states of the interiors of a step, those folded in part already among them."""
    transitions, states = pool.transitions[layer], pool.states[layer]
    heads, keys, values = states.shape[1:]
    nowhere = states.new_empty((0, heads, values))
    _, end_states = delta.scan(folds.chains, factors, chunks, (transitions, states), states, nowhere)
    bare = factors._replace(added=_blank(factors.added, keys), offset=_blank(factors.offset, keys))
    unit = torch.eye(keys, dtype=states.dtype, device=states.device).expand(1, heads, -1, -1).contiguous()
    nothing = torch.zeros_like(unit)
    nowhere = states.new_empty((0, heads, keys))
    _, products = delta.scan(folds.products, bare, chunks, (transitions, nothing), unit, nowhere)
    pool.write_map(layer, folds.states, folds.transitions, Affine(products, end_states))


def _blank(like: Tensor, width: int) -> Tensor:
    return like.new_zeros((*like.shape[:-1], width))
