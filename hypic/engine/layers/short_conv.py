"""LFM2's gated short convolution, ``W_out (c * conv(b * x))`` with ``[b | c | x] = W_in h``: a layer without a state.

All that a run of tokens leaves behind is the convolution's tail, which goes along a chain like that of any linear
layer. The state is one zero, so that the layer is a linear one to the pool and the scan: ``T`` is 1 and ``B`` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from hypic.engine.batch import Batch
from hypic.engine.layers.conv import convolve_rows
from hypic.engine.layers.norm import upcast
from hypic.engine.layers.rotary import Angles
from hypic.engine.linear.lightning import DecayInputs, Lightning
from hypic.engine.pool import LinearShape, Pool


@dataclass(frozen=True)
class Projected:
    """``gate [N, hidden]`` and ``mixed [N, hidden]``, raw and then convolved."""

    gate: Tensor
    mixed: Tensor


class GatedShortConv(nn.Module):
    """See the module's docstring; parameters are named as in the checkpoint."""

    def __init__(self, hidden_size: int, conv_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.family = Lightning()
        self.kept = LinearShape(1, 1, 1, "head", hidden_size, conv_width)
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.conv = nn.Conv1d(hidden_size, hidden_size, conv_width, groups=hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def project(self, hidden: Tensor) -> Projected:
        b, gate, x = self.in_proj(hidden).chunk(3, dim=-1)
        return Projected(gate, b * x)

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        mixed = convolve_rows(projected.mixed, self.conv.weight, batch, pool, layer, self.conv.bias)
        return replace(projected, mixed=mixed)

    def inputs(self, projected: Projected, angles: Angles | None = None) -> DecayInputs:
        """Nothing: ``q, k, v [N, 1, 1]`` and ``g [N, 1]`` are zero."""
        zero = upcast(projected.mixed.new_zeros(len(projected.mixed), 1, 1))
        return DecayInputs(zero, zero, zero, zero[..., 0])

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        """What the empty state gives, ``mixed``, is left out."""
        out: Tensor = self.out_proj(projected.gate * projected.mixed)
        return out
