"""Random chains and maps for tests, self-check and bench: every feature of ``compose`` in one small problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hypic_kernels.compose import reference
from hypic_kernels.compose.chains import IDENTITY, NOT_WANTED, STILL, ZERO, Chains, Turns


@dataclass(frozen=True)
class Problem:
    """Arguments of ``compose``."""

    chains: Chains
    transitions: tuple[Tensor, ...]
    end_states: tuple[Tensor, ...]
    initial: Tensor
    turns: Turns | None = None

    @staticmethod
    def random(
        kind: str,
        key_dim: int,
        value_dim: int,
        *,
        lengths: Sequence[int] = (3, 0, 5, 1),
        num_heads: int = 2,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32),
        state_dtypes: Sequence[torch.dtype] | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Problem:
        """Chains of ``lengths`` over one source of transitions per entry of ``dtypes``.

        End states are stored as ``state_dtypes``, the same unless given; empty for ``B = 0``.

        Maps are shared between chains, about one in eight transitions is zero and one in eight the identity, about a
        third of the states before elements are not wanted, and end states are slices of a wider tensor. Transitions
        shrink states a little, so that errors do not grow.
        """
        draw = _Draw(torch.Generator().manual_seed(seed))
        size, num_slots = sum(lengths), 4
        wide = draw.normal(num_slots, num_heads, key_dim, value_dim + key_dim)
        stored = dtypes if state_dtypes is None else state_dtypes
        return Problem(
            chains=draw.chains(lengths, size, num_slots, len(dtypes), device),
            transitions=tuple(draw.transition(kind, num_slots, num_heads, key_dim).to(device, d) for d in dtypes),
            end_states=tuple(wide.roll(n, 0).to(device, d)[..., :value_dim] for n, d in enumerate(stored)),
            initial=draw.normal(num_slots, num_heads, key_dim, value_dim).to(device),
        )

    def turned(self, num_turned: int, seed: int = 0) -> Problem:
        """The same problem, about a third of its elements still, the others rotated in ``num_turned`` pairs."""
        draw = _Draw(torch.Generator().manual_seed(seed))
        angles, like = 6 * draw.normal(5, num_turned), self.initial
        rows = draw.below(7, self.chains.num_elements) - 2
        turned = Turns(
            rows.clamp_min(STILL).to(like.device), angles.cos().to(like.device), angles.sin().to(like.device)
        )
        return replace(self, turns=turned)

    @property
    def arguments(self) -> tuple[Chains, tuple[Tensor, ...], tuple[Tensor, ...] | None, Tensor]:
        """What stands before ``before`` and ``final`` in a call of either twin."""
        return self.chains, self.transitions, self.end_states or None, self.initial

    def outputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """``before`` and ``final``, all NaN: what is not written shows. ``before`` has one row too many."""
        shape = self.initial.shape[1:]
        before = torch.full((self.chains.num_outputs + 1, *shape), math.nan, dtype=dtype, device=self.initial.device)
        return before, before.new_full((self.chains.num_chains, *shape), math.nan)

    def solve(self) -> tuple[Tensor, Tensor]:
        """``before`` and ``final`` by the reference in float64."""
        before, final = self.outputs(torch.float64)
        reference.compose(*self.arguments, before, final, self.turns)
        return before, final


@dataclass(frozen=True)
class _Draw:
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def below(self, end: int, size: int) -> Tensor:
        return torch.randint(end, (size,), generator=self.generator, dtype=torch.int32)

    def transition(self, kind: str, num_slots: int, num_heads: int, key_dim: int) -> Tensor:
        if kind == "dense":
            return 0.9 * self.normal(num_slots, num_heads, key_dim, key_dim) / math.sqrt(key_dim)
        shape = (num_slots, num_heads) if kind == "head" else (num_slots, num_heads, key_dim)
        return 0.5 + 0.5 * torch.rand(shape, generator=self.generator)

    def chains(
        self, lengths: Sequence[int], size: int, num_slots: int, num_sources: int, device: torch.device | str
    ) -> Chains:
        special, wanted = self.below(8, size), self.below(3, size) > 0
        transition = self.below(num_slots, size)
        transition[special == 0], transition[special == 1] = ZERO, IDENTITY
        order = torch.randperm(size, generator=self.generator)
        order = order[wanted[order]]
        output = torch.full((size,), NOT_WANTED, dtype=torch.int32)
        output[order] = torch.arange(len(order), dtype=torch.int32)
        initial = self.below(num_slots + 1, len(lengths)) - 1
        return Chains.of(
            torch.tensor([0, *lengths]).cumsum(0),
            transition,
            self.below(num_slots, size),
            initial,
            source=self.below(num_sources, size),
            out_index=output,
            device=device,
        )


def relative_error(result: Tensor, exact: Tensor) -> float:
    """``|result - exact| / |exact|``, infinite unless NaN stands in exactly the same places."""
    known = ~exact.isnan()
    if bool((result.isnan() == known).any()):
        return math.inf
    difference = torch.where(known, result.to(exact.dtype) - exact, 0.0)
    scale = torch.where(known, exact, 0.0).norm()
    return float(difference.norm() / scale.clamp_min(torch.finfo(exact.dtype).tiny))
