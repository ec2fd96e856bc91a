"""Decayed linear attention over a step's rows by kernels, for every layer with one decay a head.

A layer says what its tokens are and what is done to them first (``DecayRows``); silu, norms of q and k and rotary
positions happen in the kernels, which read the raw projections. Nothing here knows a layer's norm or gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.kernel_plan import KernelPlan
from hypic.engine.layers.rotary import Angles
from hypic.engine.pool import Pool
from hypic_kernels import decay


@dataclass(frozen=True)
class DecayRows:
    """``q, k [N, Hk, K]``, ``v [N, H, V]`` and ``g [N, H]``, as the layer projects them; ``rule``: see
    ``hypic_kernels.decay.Rule``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    rule: decay.Rule

    def at(self, angles: Angles | None) -> DecayRows:
        """The same rows with rotary positions."""
        return self if angles is None else replace(self, rule=replace(self.rule, cos=angles.cos, sin=angles.sin))

    def lift(self, plan: KernelPlan) -> tuple[Affine, Callable[[Tensor], Tensor]]:
        """Maps of chunks, and what gives outputs ``[N, H, V]`` in float32 from the states before them."""
        maps = decay.lift(self.k, self.v, self.g, plan.chunks, rule=self.rule)

        def read(states: Tensor) -> Tensor:
            out = torch.empty(self.v.shape, dtype=states.dtype, device=states.device)
            return decay.read(self.q, self.k, self.v, self.g, states, plan.chunks, out, rule=self.rule)

        return Affine(maps.transition, maps.end_state), read

    def step(self, plan: KernelPlan, pool: Pool, layer: int) -> Tensor:
        """Outputs of one token a chain; the pool's states are moved on in place."""
        slots = (pool.states[layer], plan.initial_slots, plan.final_slots)
        return decay.step(self.q, self.k, self.v, self.g, *slots, rule=self.rule)
