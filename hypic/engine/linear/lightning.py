"""Decayed linear attention with one decay a head (Lightning, arXiv 2401.04658).

``S_t = a_t S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t``, with ``a_t = exp(g_t)``. Lightning has a constant ``g`` per head
and layer, which the layer supplies; ``retnet`` has other constants, and ``simple_gla`` one that depends on the token.
Keys may be rotary: a moved end state is then rotated along its key axis, a transition is not
(``hypic.engine.layers.rotary``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.linear import Lifted
from hypic.engine.linear.delta import decay_matrix


@dataclass(frozen=True)
class DecayInputs:
    """``q, k [M, H, C, K]``, ``v [M, H, C, V]``, ``g [M, H, C]``; one token per row: without ``C``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class Lightning:
    """The family: one transition per head, ``[H]``."""

    has_channel_gate = False

    def lift(self, x: DecayInputs) -> Lifted:
        running = x.g.cumsum(-1)
        total = running[..., -1:]
        carried = (x.k * (total - running).exp()[..., None]).mT @ x.v
        offset = ((x.q @ x.k.mT) * decay_matrix(running)) @ x.v
        return Lifted(Affine(total[..., 0].exp(), carried), x.q * running.exp()[..., None], offset)

    def step(self, x: DecayInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * x.g.exp()[..., None, None] + x.k[..., :, None] * x.v[..., None, :]
        return (x.q[..., None, :] @ state)[..., 0, :], state
