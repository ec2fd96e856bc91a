"""Kimi delta attention (Kimi Linear, arXiv 2510.26692): the delta rule with one gate per key channel.

Token by token, with ``a_t = exp(g_t)`` per channel and ``g_t <= 0``:
``S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T`` and ``o_t = S_t^T q_t``. Which gate it is (Kimi's,
or the bounded one of Ling 3), scaling and normalisation belong to the layer. A state cannot be moved by rotation: the
gate does not commute with it.

A chunk is lifted with the WY form of the gated delta rule, whose products of keys here decay per channel
(``hypic.engine.linear.gla.decayed_scores``, which never takes the exponential of a positive number).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.linear import Lifted
from hypic.engine.linear.delta import assembled, corrected, delta_step
from hypic.engine.linear.gla import decayed_scores, gates_after


@dataclass(frozen=True)
class KDAInputs:
    """``q, k, g [M, H, C, K]``, ``v [M, H, C, V]``, ``beta [M, H, C]``; one token per row: without ``C``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class KDA:
    """The family: dense transitions ``[H, K, K]``."""

    has_channel_gate = True

    def lift(self, x: KDAInputs) -> Lifted:
        growth = x.g.cumsum(-2).exp()
        scores, couplings = decayed_scores(torch.stack([x.q, x.k]), x.k, x.g)
        sides = torch.cat([x.v, x.k * growth], dim=-1) * x.beta[..., None]
        both = corrected(couplings * x.beta[..., None], sides)
        carried = (x.k * gates_after(x.g).exp()).mT @ both
        return assembled(torch.diag_embed(growth[..., -1, :]), carried, x.q * growth, scores @ both)

    def step(self, x: KDAInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(x.q, x.k, x.v, x.beta, state * x.g.exp()[..., None])
