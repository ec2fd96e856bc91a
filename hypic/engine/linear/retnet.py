"""Retention (RetNet, arXiv 2307.08621): a constant decay per head, between 31/32 for the first and nearly one.

``S_t = gamma S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t``, with ``gamma = 1 - 2^(-5 - h)`` for head ``h``: Lightning's
recurrence with other decays. Keys are rotary, so states are moved by rotation. The decays enter as ``g`` all the same,
token by token, because a token that is only padding must not decay the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.linear.lightning import DecayInputs, Lightning


@dataclass(frozen=True)
class RetNetInputs(DecayInputs):
    """As Lightning's; ``g [M, H, C]`` are ``retention_gates``, or zero where a token is padding."""


class RetNet(Lightning):
    """The family: one transition per head, ``[H]``, known from the number of tokens alone."""


def retention_gates(num_heads: int, factor: float = 1.0) -> Tensor:
    """``log(1 - 2^(-5 - h)) * factor``, ``[H]`` in float64 on the host.

    ``factor`` belongs to the architecture, as with ALiBi's slopes: some let decays weaken from layer to layer.
    """
    gates = [math.log1p(-(2.0 ** (-5 - head))) for head in range(num_heads)]
    return torch.tensor(gates, dtype=torch.float64, device="cpu") * factor
