"""Random chains over the chunks of a problem, for tests, self-check and bench of ``scan``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic_kernels.compose.chains import IDENTITY, NOT_WANTED, ZERO, Chains
from hypic_kernels.delta import reference
from hypic_kernels.delta.problem import Problem


@dataclass(frozen=True)
class Walk:
    """Chains over a problem's chunks, with stored maps between them."""

    chains: Chains
    stored: tuple[Tensor, Tensor] | None
    initial: Tensor
    final_slots: Tensor
    num_tokens: int

    @staticmethod
    def random(
        problem: Problem,
        map_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32),
        state_dtype: torch.dtype = torch.float32,
    ) -> Walk:
        """Three chains, the second of stored maps only, each chunk in one of them (chains are walked side by side);
        some transitions are zero, some the identity; stored maps stand alone, in pairs and after up to two chunks; a
        third of the states before elements is wanted; the last chain's final state is not written. Without
        ``map_dtypes`` chunks only.
        """
        count, device = len(problem.chunks), problem.q.device
        rows: list[tuple[int, int, int]] = []
        ends = [0]
        for number in range(3):
            for step, chunk in enumerate(range(number // 2, count, 2) if number != 1 else ()):
                rows += [(0, chunk, chunk)] + [(1, (chunk % 5) - 2, chunk % 4)] * (
                    (step + number) % 3 if map_dtypes else 0
                )
            rows += [(1, 1, 2), (1, IDENTITY, 0), (1, 3, 1), (1, ZERO, 3)] if map_dtypes and number == 1 else []
            ends.append(len(rows))
        wanted = [place // 3 if place % 3 == 1 else NOT_WANTED for place in range(len(rows))]
        source, transition, state = zip(*rows, strict=True) if rows else ((), (), ())
        chains = Chains.of(ends, transition, state, [0, ZERO, 2], source=source, out_index=wanted, device=device)
        stored = _stored(problem, 4, (map_dtypes[0], map_dtypes[1])) if map_dtypes else None
        slots = torch.tensor([1, 0, -1], dtype=torch.int32, device=device)
        return Walk(chains, stored, problem.states.to(state_dtype), slots, len(problem.q))

    @staticmethod
    def warm(problem: Problem, num_segments: int, seed: int = 0) -> Walk:
        """One chain: a chunk and a stored map in turn, then the other chunks, from a stored state."""
        device, count = problem.q.device, len(problem.chunks)
        rows = [element for n in range(num_segments) for element in ((0, n, n), (1, n, n))]
        rows += [(0, n, n) for n in range(num_segments, count)]
        source, transition, state = zip(*rows, strict=True)
        unwanted = [NOT_WANTED] * len(rows)
        chains = Chains.of([0, len(rows)], transition, state, [0], source=source, out_index=unwanted, device=device)
        stored = _stored(problem, num_segments, (torch.float32, torch.float32), seed)
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        return Walk(chains, stored, problem.states, slots, len(problem.q))

    def outputs(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """``out``, ``before`` and ``final``, all NaN: what is not written shows."""
        shape, device = self.initial.shape[1:], self.initial.device
        sizes = (self.num_tokens, shape[0], shape[2]), (self.chains.num_outputs, *shape), (2, *shape)
        types = dtype, state_dtype, state_dtype
        out, before, final = (
            torch.full(size, math.nan, dtype=kind, device=device) for size, kind in zip(sizes, types, strict=True)
        )
        return out, before, final

    def exact(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """The same by the reference in float64, without a norm."""
        found = self.outputs(torch.float64, torch.float64)
        reference.scan(
            problem.lifted(), problem.chunks, self.chains, self.stored, self.initial, *found, self.final_slots
        )
        return found


def _stored(
    problem: Problem, count: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int = 5
) -> tuple[Tensor, Tensor]:
    """Maps that shrink states a little, so that errors do not grow."""
    draw, (_, heads, key_dim, value_dim) = torch.Generator().manual_seed(seed), problem.states.shape
    transitions = torch.randn(count, heads, key_dim, key_dim, generator=draw) * 0.9 / math.sqrt(key_dim)
    vectors = torch.randn(count, heads, key_dim, value_dim, generator=draw)
    device = problem.q.device
    return transitions.to(device, dtypes[0]), vectors.to(device, dtypes[1])
