"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464); with ``g = 0`` it is DeltaNet (``delta_net``).

Token by token, with ``a_t = exp(g_t)``: ``S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`` and
``o_t = S_t^T q_t``. Scaling and normalisation of ``q`` and ``k`` belong to the layer.

A chunk is lifted with the WY form: with ``G`` the running sum of ``g``, the rows
``[U | W] = (I + A)^-1 [beta v | beta e^G k]``, ``A_ij = beta_i (k_i . k_j) e^(G_i - G_j)`` for ``j < i``, give the
corrected values ``U - W S``; map and readout follow by linearity. The inverse comes of a triangular solve (squaring the
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


def corrected(couplings: Tensor, sides: Tensor) -> Tensor:
    """``(I + A)^-1 sides``, where ``A [M, H, C, C]`` is what stands below the diagonal of ``couplings``.

    The inverse is made first. Its entries are bounded by the betas, since they are products of contractions, so that
    nothing is lost; and a solve with ``C`` right-hand sides and one matrix product take a fraction of the time that a
    solve with ``V + K`` of them takes (on a CPU a quarter for chunks of 16).
    """
    eye = torch.eye(couplings.shape[-1], dtype=couplings.dtype, device=couplings.device).expand_as(couplings)
    inverse: Tensor = torch.linalg.solve_triangular(couplings, eye, upper=False, unitriangular=True)
    return inverse @ sides


def assembled(kept: Tensor, carried: Tensor, query: Tensor, seen: Tensor) -> Lifted:
    """From what ``[U | W]`` add up to at the chunk's end, ``carried [M, H, K, V + K]``, and under the queries,
    ``seen [M, H, C, V + K]``; ``kept [M, H, K, K]`` and ``query`` are what would be without corrections."""
    size = carried.shape[-1] - carried.shape[-2]
    maps = Affine(kept - carried[..., size:], carried[..., :size])
    return Lifted(maps, query - seen[..., size:], seen[..., :size])


def delta_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token behind a state ``[N, H, K, V]`` that has decayed already: outputs and the new state."""
    correction = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state = state + k[..., :, None] * correction[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


class GatedDelta:
    """The family: dense transitions ``[H, K, K]``."""

    has_channel_gate = False

    def lift(self, x: DeltaInputs) -> Lifted:
        running = x.g.cumsum(-1)
        decay, growth, total = decay_matrix(running), running.exp()[..., None], running[..., -1:]
        couplings = (x.k @ x.k.mT) * decay * x.beta[..., None]
        both = corrected(couplings, torch.cat([x.v, x.k * growth], dim=-1) * x.beta[..., None])
        carried = (x.k * (total - running).exp()[..., None]).mT @ both
        seen = ((x.q @ x.k.mT) * decay) @ both
        eye = torch.eye(x.k.shape[-1], dtype=x.k.dtype, device=x.k.device)
        return assembled(eye * total.exp()[..., None], carried, x.q * growth, seen)

    def step(self, x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(x.q, x.k, x.v, x.beta, state * x.g.exp()[..., None, None])
