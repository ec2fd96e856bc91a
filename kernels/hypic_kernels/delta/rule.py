"""What the calls of this package share: the layer's preparation of its inputs, its norm, the maps, and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Precision = Literal["ieee", "tf32x3", "bf16x3", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32x3", "bf16x3", "bf16")
TOLERANCE: dict[Precision, float] = {"ieee": 1e-5, "tf32x3": 1e-5, "bf16x3": 1e-4, "bf16": 2e-2}
"""Of the relative error; plain TF32 would stand at 3e-4."""

ScanPrecision = Literal["ieee", "tf32x3", "bf16x6", "bf16x3"]
"""Of products of stored transitions with states, both float32. In bfloat16 numbers of 8 bits each: ``bf16x6`` takes
three of either operand and the six largest of their nine products, ``bf16x3`` two and three of four."""
SCAN_PRECISIONS: tuple[ScanPrecision, ...] = ("ieee", "tf32x3", "bf16x6", "bf16x3")
SCAN_TOLERANCE: dict[ScanPrecision, float] = {"ieee": 1e-5, "tf32x3": 1e-5, "bf16x6": 1e-5, "bf16x3": 3e-5}
"""Of the relative error of a whole chain."""


class DeltaError(ValueError):
    """Tensors that do not fit each other, or that the kernel cannot address."""


@dataclass(frozen=True)
class Rule:
    """What the layer does to its inputs before the rule.

    ``normalise``: q and k become ``x / sqrt(sum(x^2) + eps)`` over the head; q is scaled by ``scale`` in any case.
    With ``A_log`` and ``dt_bias``, both ``[Hv]``, the arguments ``g`` and ``beta`` hold the projections a and b, and
    ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = beta_scale sigmoid(b)``, in float32 or wider.
    """

    normalise: bool = False
    scale: float = 1.0
    eps: float = 1e-6
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.A_log is None) != (self.dt_bias is None):
            raise DeltaError("a rule has A_log and dt_bias both or neither; one of them is None.")


@dataclass(frozen=True)
class GatedNorm:
    """``rms(o) * weight * silu(z)`` over each head, ``z [N, Hv, V]``, ``weight [V]``: the norm before the gate."""

    z: Tensor
    weight: Tensor
    eps: float


class Maps(NamedTuple):
    """Of chunks: the state goes ``S -> transition @ S + end_state``, outputs are ``query @ S + offset``.

    ``transition [M, Hv, K, K]``, ``end_state [M, Hv, K, V]``, ``query [M, Hv, C, K]``, ``offset [M, Hv, C, V]``.
    """

    transition: Tensor
    end_state: Tensor
    query: Tensor
    offset: Tensor

    @staticmethod
    def empty(
        num_chunks: int, size: int, num_heads: int, key_dim: int, value_dim: int, like: Tensor, dtype: torch.dtype
    ) -> Maps:
        def make(rows: int, columns: int) -> Tensor:
            return torch.empty((num_chunks, num_heads, rows, columns), dtype=dtype, device=like.device)

        return Maps(make(key_dim, key_dim), make(key_dim, value_dim), make(size, key_dim), make(size, value_dim))


def state_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any is, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
