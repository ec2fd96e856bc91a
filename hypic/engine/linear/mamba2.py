"""Mamba-2's state space duality (arXiv 2405.21060): one decay a head, keys and queries shared by groups of heads.

``S_t = a_t S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t``, with ``a_t = exp(g_t)``. In Mamba-2's own words ``k`` is ``B``,
``q`` is ``C``, ``v`` is ``dt u`` and ``g`` is ``dt A``; here the state is key-first, ``[N, P]``, where Mamba-2 keeps
``[P, N]``. The skip ``D u``, the discretisation and the gate belong to the layer. Head ``h`` of ``H`` uses group
``h // (H / G)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.linear import Lifted
from hypic.engine.linear.delta import decay_matrix


@dataclass(frozen=True)
class Mamba2Inputs:
    """``q, k [M, G, C, K]`` of ``G`` groups, ``v [M, H, C, V]``, ``g [M, H, C]``; one token per row: without ``C``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class Mamba2:
    """The family: one transition per head, ``[H]``."""

    has_channel_gate = False

    def lift(self, x: Mamba2Inputs) -> Lifted:
        running, heads = x.g.cumsum(-1), x.v.shape[1]
        total = running[..., -1:]
        carried = _to_heads(x.k, heads).mT @ (x.v * (total - running).exp()[..., None])
        offset = (_to_heads(x.q @ x.k.mT, heads) * decay_matrix(running)) @ x.v
        query = _to_heads(x.q, heads) * running.exp()[..., None]
        return Lifted(Affine(total[..., 0].exp(), carried), query, offset)

    def step(self, x: Mamba2Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        heads = x.v.shape[1]
        state = state * x.g.exp()[..., None, None] + _to_heads(x.k, heads)[..., :, None] * x.v[..., None, :]
        return (_to_heads(x.q, heads)[..., None, :] @ state)[..., 0, :], state


def _to_heads(x: Tensor, num_heads: int) -> Tensor:
    """``[N, G, ...]`` -> ``[N, H, ...]``: every group's rows once for each of its heads."""
    groups = x.shape[1]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=1)
