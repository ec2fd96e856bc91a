"""The delta rule without a gate (DeltaNet, arXiv 2406.06484).

``S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T``, ``o_t = S_t^T q_t``: the gated rule of
``hypic.engine.linear.delta`` with ``g = 0``, without the work for decays. Scaling and normalisation of ``q`` and ``k``
belong to the layer; ``beta`` may be as large as 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.linear import Lifted
from hypic.engine.linear.delta import assembled, corrected, delta_step


@dataclass(frozen=True)
class DeltaNetInputs:
    """``q, k [M, H, C, K]``, ``v [M, H, C, V]``, ``beta [M, H, C]``; one token per row: without ``C``."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor


class DeltaNet:
    """The family: dense transitions ``[H, K, K]``."""

    has_channel_gate = False

    def lift(self, x: DeltaNetInputs) -> Lifted:
        beta = x.beta[..., None]
        both = corrected((x.k @ x.k.mT) * beta, torch.cat([x.v, x.k], dim=-1) * beta)
        eye = torch.eye(x.k.shape[-1], dtype=x.k.dtype, device=x.k.device)
        return assembled(eye, x.k.mT @ both, x.q, (x.q @ x.k.mT).tril() @ both)

    def step(self, x: DeltaNetInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(x.q, x.k, x.v, x.beta, state)
