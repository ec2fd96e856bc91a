"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464; DeltaNet, arXiv 2406.06484, is ``g = 0``).

Token by token, with ``a_t = exp(g_t)``: ``S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`` and
``o_t = S_t^T q_t``. Scaling and normalisation of ``q`` and ``k`` belong to the layer.

A chunk is lifted with the WY form: with ``G`` the running sum of ``g``, the rows
``[U | W] = (I + A)^-1 [beta v | beta e^G k]``, ``A_ij = beta_i (k_i . k_j) e^(G_i - G_j)`` for ``j < i``, give the
corrected values ``U - W S``; map and readout follow by linearity. The solve is a triangular one (squaring the
nilpotent part overflows). All of it is differentiable, and training uses it as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.linear import Lifted


@dataclass(frozen=True)
class DeltaInputs:
    """``q, k [M, H, C, K]``, ``v [M, H, C, V]``, ``g, beta [M, H, C]``; one token per row: without ``C``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def decay_matrix(running: Tensor) -> Tensor:
    """``e^(G_i - G_j)`` for ``j <= i``, else 0: ``[M, H, C]`` -> ``[M, H, C, C]``."""
    size = running.shape[-1]
    above = torch.ones(size, size, dtype=torch.bool, device=running.device).triu(1)
    difference = running[..., :, None] - running[..., None, :]
    return difference.masked_fill(above, float("-inf")).exp()


class GatedDelta:
    """The family: dense transitions ``[H, K, K]``."""

    has_channel_gate = False

    def lift(self, x: DeltaInputs) -> Lifted:
        running = x.g.cumsum(-1)
        decay, growth, total = decay_matrix(running), running.exp()[..., None], running[..., -1:]
        size = x.v.shape[-1]
        couplings = (x.k @ x.k.mT) * decay * x.beta[..., None]
        sides = torch.cat([x.v, x.k * growth], dim=-1) * x.beta[..., None]
        corrected = torch.linalg.solve_triangular(couplings, sides, upper=False, unitriangular=True)
        carried = (x.k * (total - running).exp()[..., None]).mT @ corrected
        seen = ((x.q @ x.k.mT) * decay) @ corrected
        eye = torch.eye(x.k.shape[-1], dtype=x.k.dtype, device=x.k.device)
        transition = eye * total.exp()[..., None] - carried[..., size:]
        maps = Affine(transition, carried[..., :size])
        return Lifted(maps, x.q * growth - seen[..., size:], seen[..., :size])

    def step(self, x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * x.g.exp()[..., None, None]
        correction = x.beta[..., None] * (x.v - (x.k[..., None, :] @ state)[..., 0, :])
        state = state + x.k[..., :, None] * correction[..., None, :]
        return (x.q[..., None, :] @ state)[..., 0, :], state
