"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.layers.norm import by_kernel
from hypic.engine.layers.projections import Joined
from hypic_kernels import pointwise


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self._joined = Joined(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(*self._joined(x)))
        return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[N, size]``."""
    return pointwise.silu_mul(gate, up) if by_kernel(gate) else F.silu(gate) * up
