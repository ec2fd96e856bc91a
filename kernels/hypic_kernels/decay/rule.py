"""What the calls of this package share: the layer's preparation of its inputs, the maps, and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hypic_kernels.delta.rule import PRECISIONS, TOLERANCE, Precision, state_dtype

__all__ = ["PRECISIONS", "TOLERANCE", "DecayError", "Maps", "Precision", "Rule", "state_dtype"]


class DecayError(ValueError):
    """Tensors that do not fit each other, or that the kernel cannot address."""


@dataclass(frozen=True)
class Rule:
    """What the layer does to q, k and v before the recurrence, in this order and in float32 or wider.

    ``silu`` acts on all three. With ``q_weight`` and ``k_weight``, both ``[K]``, q and k of a head become
    ``x / sqrt(mean(x^2) + eps) * weight``. With ``cos`` and ``sin``, both ``[N, R]``, channel ``i`` of each is rotated
    with channel ``i + R``, ``i < R``, by the angle of its token. Then q is multiplied by ``scale``.
    """

    silu: bool = False
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    cos: Tensor | None = None
    sin: Tensor | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, one, other in (("q_weight", self.q_weight, self.k_weight), ("cos", self.cos, self.sin)):
            if (one is None) != (other is None):
                raise DecayError(f"a rule has both of a pair or neither; {name} or its partner is None.")

    @property
    def num_turned(self) -> int:
        """Pairs of channels that are rotated."""
        return 0 if self.cos is None else self.cos.shape[1]


class Maps(NamedTuple):
    """Of chunks: the state goes ``S -> transition S + end_state``; ``[M, Hv]`` and ``[M, Hv, K, V]``."""

    transition: Tensor
    end_state: Tensor

    @staticmethod
    def empty(num_chunks: int, num_heads: int, key_dim: int, value_dim: int, like: Tensor, dtype: torch.dtype) -> Maps:
        transition = torch.empty((num_chunks, num_heads), dtype=dtype, device=like.device)
        return Maps(transition, transition.new_empty((num_chunks, num_heads, key_dim, value_dim)))
