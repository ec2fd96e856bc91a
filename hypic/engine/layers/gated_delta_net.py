"""The Gated DeltaNet layer (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 build it.

Convolution over q, k and v together, silu, l2-normalised q and k, ``beta = sigmoid(b)``,
``g = -exp(A_log) softplus(a + dt_bias)``, a gated norm per head, and an output projection; no biases. OLMo-Hybrid
doubles ``beta``, so that a step may flip a direction of the state (negative eigenvalues, arXiv 2411.12537).
Value head ``j`` uses key head ``j // (num_v_heads / num_k_heads)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.affine import Affine
from hypic.engine.batch import Batch
from hypic.engine.kernel_plan import KernelPlan
from hypic.engine.layers.conv import convolve_planned, convolve_rows
from hypic.engine.layers.norm import GatedRMSNorm, l2_normalise, upcast
from hypic.engine.layers.projections import Joined, projected
from hypic.engine.layers.rotary import Angles
from hypic.engine.linear.delta import DeltaInputs, GatedDelta
from hypic.engine.pool import LinearShape, Pool
from hypic_kernels import delta
from hypic_kernels.rows import Rows


@dataclass(frozen=True)
class DeltaNetShape:
    """Sizes of the layer; ``beta`` is ``beta_scale * sigmoid(b)``."""

    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int
    eps: float
    beta_scale: float = 1.0

    @property
    def key_size(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_size(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def kept(self) -> LinearShape:
        channels = 2 * self.key_size + self.value_size
        return LinearShape(self.num_v_heads, self.head_k_dim, self.head_v_dim, "dense", channels, self.conv_width)


@dataclass(frozen=True)
class Projected:
    """``mixed [N, channels]`` (raw, then convolved), ``z [N, value_size]``, ``b, a [N, num_v_heads]``."""

    mixed: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class HeadRows(NamedTuple):
    """Convolved tokens by head: ``q, k [N, Hk, K]``, ``v [N, Hv, V]``, raw ``a, b [N, Hv]``, and what is done with
    them; ``out [N, Hv, V]`` is filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    norm: delta.GatedNorm
    rule: delta.Rule
    out: Tensor

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.a, self.b

    def at(self, span: slice) -> HeadRows:
        """Some of the tokens that follow each other."""
        q, k, v, a, b = (x[span] for x in self.tokens)
        norm = self.norm
        return HeadRows(q, k, v, a, b, delta.GatedNorm(norm.z[span], norm.weight, norm.eps), self.rule, self.out[span])


class GatedDeltaNet(nn.Module):
    """See the module's docstring; parameters are named as in the checkpoint."""

    def __init__(self, shape: DeltaNetShape) -> None:
        super().__init__()
        self.shape, self.family = shape, GatedDelta()
        channels = shape.kept.conv_channels
        self.in_proj_qkv = nn.Linear(shape.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, shape.value_size, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, shape.num_v_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, shape.num_v_heads, bias=False)
        self._joined = Joined(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_width, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.num_v_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.num_v_heads))
        self.norm = GatedRMSNorm(shape.head_v_dim, shape.eps)
        self.out_proj = nn.Linear(shape.value_size, shape.hidden_size, bias=False)

    @property
    def kept(self) -> LinearShape:
        return self.shape.kept

    def project(self, hidden: Tensor) -> Projected:
        return Projected(*self._joined(hidden))

    def convolve(self, projected: Projected, batch: Batch, pool: Pool, layer: int) -> Projected:
        mixed = convolve_rows(projected.mixed, self.conv1d.weight, batch, pool, layer)
        return replace(projected, mixed=mixed)

    def inputs(self, projected: Projected, angles: Angles | None = None) -> DeltaInputs:
        """From convolved projections: ``q, k [N, Hv, K]``, ``v [N, Hv, V]``, ``g, beta [N, Hv]``, at least fp32."""
        shape = self.shape
        sizes = [shape.key_size, shape.key_size, shape.value_size]
        q, k, v = torch.split(F.silu(projected.mixed), sizes, dim=-1)
        repeats = shape.num_v_heads // shape.num_k_heads
        q = l2_normalise(q.reshape(len(q), shape.num_k_heads, -1)).repeat_interleave(repeats, dim=-2)
        k = l2_normalise(k.reshape(len(k), shape.num_k_heads, -1)).repeat_interleave(repeats, dim=-2)
        g = -upcast(self.A_log).exp() * F.softplus(upcast(projected.a) + upcast(self.dt_bias))
        v = upcast(v.reshape(len(v), shape.num_v_heads, -1))
        beta = upcast(projected.b.sigmoid()) * shape.beta_scale
        return DeltaInputs(q * shape.head_k_dim**-0.5, k, v, g, beta)

    def output(self, mixed: Tensor, projected: Projected) -> Tensor:
        gate = projected.z.view(len(mixed), self.shape.num_v_heads, -1)
        out: Tensor = self.out_proj(self.norm(mixed, gate).flatten(-2))
        return out

    # -- by kernels --------------------------------------------------------------------------------------------------

    def lift_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None = None
    ) -> tuple[Affine, Callable[[Tensor], Tensor]]:
        """See ``linear_kernels.FusedMixer``."""
        rows = self.rows(projected, plan, pool, layer)
        maps, fill = self.lift_chunks(rows, plan.chunks)

        def read(states: Tensor) -> Tensor:
            fill(states)
            return self.project_back(rows)

        return maps, read

    def rows(self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int) -> HeadRows:
        """See ``linear_runs.RunMixer``."""
        q, k, v = self._convolved(projected, plan, pool, layer)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        return HeadRows(q, k, v, projected.a, projected.b, self._norm_of(projected), self._rule, out)

    def lift_chunks(self, rows: HeadRows, chunks: Tensor) -> tuple[Affine, Callable[[Tensor], None]]:
        """See ``linear_runs.RunMixer``."""
        maps = delta.lift(*rows.tokens, chunks, rule=rows.rule)

        def read(states: Tensor) -> None:
            delta.read(maps.query, maps.offset, states, chunks, rows.out, norm=rows.norm)

        return Affine(maps.transition, maps.end_state), read

    def scan_rows(self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int) -> Tensor | None:
        """See ``linear_kernels.ScanningMixer``."""
        if not self._can_scan(projected.mixed.dtype, plan, pool, layer, self._rule):
            return None
        rows = self.rows(projected, plan, pool, layer)
        self._scan(rows, plan.chunks, plan, pool, layer)
        return self._projected_back(rows.out)

    def scan_chunks(self, rows: HeadRows, plan: KernelPlan, pool: Pool, layer: int) -> bool:
        """See ``linear_runs.RunMixer``. The norm is over all rows that are given: those of runs, which have theirs,
        must not stand among them."""
        runs, is_mapped = plan.runs, plan.folds is not None or plan.gathers
        if (
            runs is None
            or runs.others is None
            or is_mapped
            or not self._can_scan(rows.q.dtype, plan, pool, layer, rows.rule)
        ):
            return False
        self._scan(rows.at(runs.others), runs.other_chunks, plan, pool, layer)
        return True

    def _can_scan(self, dtype: torch.dtype, plan: KernelPlan, pool: Pool, layer: int, rule: delta.Rule) -> bool:
        states, num_k_heads = pool.states[layer], self.shape.num_k_heads
        stored = pool.transitions[layer], states
        return plan.slotted is not None and delta.can_scan(dtype, num_k_heads, plan.chunks, stored, states, rule=rule)

    def _scan(self, rows: HeadRows, chunks: Tensor, plan: KernelPlan, pool: Pool, layer: int) -> None:
        slotted, states = plan.slotted, pool.states[layer]
        assert slotted is not None, "decoding is not scanned"
        delta.scan(
            *rows.tokens, chunks, slotted.chains, (pool.transitions[layer], states), states, rows.out, rule=rows.rule,
            norm=rows.norm, before=states, final=states, final_slots=plan.final_slots,
        )  # fmt: skip
        if slotted.copies_to.shape[0]:
            states.index_copy_(0, slotted.copies_to, states.index_select(0, slotted.copies_from))

    def runs_rows(self) -> bool:
        """See ``linear_runs.RunMixer``; on a CPU the reference runs them."""
        shape, weight = self.shape, self.conv1d.weight
        sizes = (shape.num_k_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim)
        return not weight.is_cuda or delta.runs_here(*sizes, weight.dtype, weight.device)

    def run_rows(
        self, tokens: HeadRows, rows: Rows, initial: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """See ``linear_runs.RunMixer``."""
        states, slots = initial
        return delta.run(
            *tokens.tokens, rows, states, tokens.out, slots=slots, into=into, rule=tokens.rule, norm=tokens.norm
        )

    def project_back(self, rows: HeadRows) -> Tensor:
        """See ``linear_runs.RunMixer``."""
        return self._projected_back(rows.out)

    def step_rows(
        self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None = None
    ) -> Tensor:
        """See ``linear_kernels.FusedMixer``."""
        q, k, v = self._convolved(projected, plan, pool, layer)
        slots = (pool.states[layer], plan.initial_slots, plan.final_slots)
        norm = self._norm_of(projected)
        return self._projected_back(delta.step(q, k, v, projected.a, projected.b, *slots, rule=self._rule, norm=norm))

    def _convolved(self, projected: Projected, plan: KernelPlan, pool: Pool, layer: int) -> tuple[Tensor, ...]:
        shape = self.shape
        mixed = convolve_planned(projected.mixed, self.conv1d.weight, plan, pool, layer, has_silu=True)
        q, k, v = mixed.split_with_sizes((shape.key_size, shape.key_size, shape.value_size), dim=-1)
        heads = (shape.num_k_heads, shape.num_k_heads, shape.num_v_heads)
        return tuple(x.view(x.shape[0], num, -1) for x, num in zip((q, k, v), heads, strict=True))

    @property
    def _rule(self) -> delta.Rule:
        shape = self.shape
        return delta.Rule(
            normalise=True,
            scale=shape.head_k_dim**-0.5,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            beta_scale=shape.beta_scale,
        )

    def _norm_of(self, projected: Projected) -> delta.GatedNorm:
        z = projected.z.view(projected.z.shape[0], self.shape.num_v_heads, -1)
        return delta.GatedNorm(z, self.norm.weight, self.norm.eps)

    def _projected_back(self, out: Tensor) -> Tensor:
        return projected(out.flatten(-2), self.out_proj)
