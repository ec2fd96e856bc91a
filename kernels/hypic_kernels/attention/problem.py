"""Random problems for tests, self-check and bench: shared keys, slots in no order, holes full of NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hypic_kernels.attention import reference
from hypic_kernels.attention.layout import Config, HeadDims
from hypic_kernels.attention.plan import ChainQueries, Plan, PlanSizes, plan_of


@dataclass(frozen=True)
class Work:
    """One chain: ``length`` keys; its queries are ``rows`` of (first position, number of tokens)."""

    length: int
    rows: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> list[int]:
        return [position for first, number in self.rows for position in range(first, first + number)]

    @staticmethod
    def last(length: int, num_tokens: int) -> Work:
        """The last tokens of a chain ask."""
        return Work(length, ((length - num_tokens, num_tokens),))


SMALL = (Work.last(70, 5), Work(45, ((0, 3), (17, 7))), Work(0, ()), Work.last(1, 1), Work.last(33, 1))


@dataclass(frozen=True)
class Problem:
    """Arguments of ``attend``; ``out`` has rows that no tile names."""

    q: Tensor
    keys: Tensor
    values: Tensor
    plan: Plan
    cos: Tensor | None
    sin: Tensor | None
    scale: float
    dims: HeadDims
    chains: tuple[ChainQueries, ...]

    @staticmethod
    def random(
        dims: HeadDims,
        work: Sequence[Work] = SMALL,
        *,
        num_key_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        query_dtype: torch.dtype | None = None,
        tile: int = 4,
        num_lanes: int = 0,
        unit: int = 16,
        is_moved: bool = False,
        spare: int = 0,
        num_slots: int | None = None,
        is_drawn_there: bool = False,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Problem:
        """``is_moved``: keys turn by positions that are not their index. ``spare``: padding of the plan, of each kind.

        Chains share slots where ``num_slots`` is less than they need together; slots that no chain names are NaN.
        ``is_drawn_there``: numbers are drawn on the device, which is quick and depends on it.
        """
        draw = torch.Generator().manual_seed(seed)
        longest = max((w.length for w in work), default=0)
        total = num_slots or sum(w.length for w in work) + 7
        chains, used = [], np.zeros(total, dtype=bool)
        for place, w in enumerate(work):
            order = torch.randperm(total, generator=draw)[: w.length].numpy()
            used[order] = True
            turns = (np.arange(w.length) * 3 + place) % (longest + 5) if is_moved else None
            chains.append(ChainQueries(order, np.asarray(w.positions, dtype=np.int64), turns))
        plan = _padded_plan(chains, tile, num_lanes, unit, spare).to(device)

        there = torch.Generator(device).manual_seed(seed) if is_drawn_there else draw

        def normal(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.randn(shape, generator=there, device=there.device).to(device, dtype)

        def stored(width: int) -> Tensor:
            wide = normal(dtype, total, num_key_heads, width)
            wide[torch.from_numpy(~used).to(device)] = math.nan
            return wide

        half = dims.rotary_dim // 2
        angles = torch.arange(longest + 8)[:, None] * 0.7 ** torch.arange(1, half + 1)
        return Problem(
            q=normal(query_dtype or dtype, plan.sizes.num_tokens, num_key_heads * dims.group, dims.query_dim),
            keys=stored(dims.key_dim),
            values=stored(dims.value_dim),
            plan=plan,
            cos=angles.cos().to(device, torch.float32) if half else None,
            sin=angles.sin().to(device, torch.float32) if half else None,
            scale=1.5 * dims.query_dim**-0.5,
            dims=dims,
            chains=tuple(chains),
        )

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Plan, Tensor | None, Tensor | None, float]:
        """What stands before ``out`` in a call of either twin."""
        return self.q, self.keys, self.values, self.plan, self.cos, self.sin, self.scale

    def output(self, dtype: torch.dtype | None = None) -> Tensor:
        """All NaN: what is not written shows."""
        shape = (*self.q.shape[:2], self.dims.value_dim)
        return torch.full(shape, math.nan, dtype=dtype or self.q.dtype, device=self.q.device)

    def solve(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """By the reference in float64."""
        out = self.output(dtype)
        reference.attend(*self.arguments, out, is_latent=self.dims.is_latent)
        return out

    def planned(self, tile: int, num_lanes: int = 0) -> Plan:
        """The same chains in tiles of another size, without padding."""
        return plan_of(self.chains, tile=tile, num_lanes=num_lanes, device=self.q.device)

    def run(self, config: Config, out_dtype: torch.dtype | None = None) -> Tensor:
        """By the kernel."""
        from hypic_kernels.attention import launching as kernel

        out = self.output(out_dtype)
        kernel.attend(*self.arguments, out, self.dims, config)
        return out


def _padded_plan(chains: Sequence[ChainQueries], tile: int, num_lanes: int, unit: int, spare: int) -> Plan:
    plan = plan_of(chains, tile=tile, num_lanes=num_lanes, unit=unit)
    if spare == 0:
        return plan
    sizes = PlanSizes(*(number + spare for number in plan.sizes))
    return plan_of(chains, tile=tile, num_lanes=num_lanes, unit=unit, sizes=sizes)
