"""Random tokens, chunks and states for tests, self-check and bench: every feature in one small problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hypic_kernels.decay import reference
from hypic_kernels.decay.rule import Maps, Rule


@dataclass(frozen=True)
class Shape:
    """Chunks of ``size`` tokens cut from rows of ``lengths``, then ``padding`` chunks without a token.

    ``num_turned`` pairs of channels are rotated, none if 0. ``is_fixed``: the decay is one number a head.
    """

    key_dim: int
    value_dim: int
    num_k_heads: int = 2
    num_v_heads: int = 2
    size: int = 16
    lengths: tuple[int, ...] = (8, 1, 35)
    padding: int = 1
    num_turned: int = 0
    silu: bool = False
    has_norm: bool = True
    is_fixed: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Problem:
    """Arguments of the three calls; ``states [slots, Hv, K, V]``, a slot for each chunk at least."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    chunks: Tensor
    rule: Rule
    states: Tensor

    @staticmethod
    def random(
        shape: Shape, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
    ) -> Problem:
        """q, k and v are views of one projection; without a norm q and k are short, so that states stay small."""
        draw, size = torch.Generator().manual_seed(seed), shape.num_tokens

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw)

        widths = [shape.num_k_heads * shape.key_dim] * 2 + [shape.num_v_heads * shape.value_dim]
        wide = normal(size, sum(widths)) / (1.0 if shape.has_norm else math.sqrt(shape.key_dim))
        heads = (shape.num_k_heads, shape.num_k_heads, shape.num_v_heads)
        parts = torch.split(wide.to(device, dtype), widths, dim=-1)
        q, k, v = (part.view(size, num, part.shape[1] // num) for part, num in zip(parts, heads, strict=True))
        fixed = -torch.linspace(0.02, 0.7, shape.num_v_heads).expand(size, -1)
        g = fixed.to(device) if shape.is_fixed else (-normal(size, shape.num_v_heads).exp() / 8).to(device)
        chunks = chunks_of(shape, device)
        states = normal(len(chunks) + 3, shape.num_v_heads, shape.key_dim, shape.value_dim).to(device)
        return Problem(q, k, v, g, chunks, _rule(shape, draw, dtype, device), states)

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g

    @property
    def is_used(self) -> Tensor:
        """Chunks that hold a token, ``[M]``."""
        return ((self.chunks >= 0) & (self.chunks < len(self.q))).any(1)

    def poisoned(self, dtype: torch.dtype = torch.float32) -> Maps:
        """Outputs of ``lift``, all NaN: what is not written shows."""
        maps = Maps.empty(len(self.chunks), self.v.shape[1], self.k.shape[2], self.v.shape[2], self.v, dtype)
        for tensor in maps:
            tensor.fill_(math.nan)
        return maps

    def lifted(self) -> Maps:
        """By the reference in float64; NaN for chunks without a token."""
        wide = self.wide()
        maps = reference.lift(wide.k, wide.v, wide.g, self.chunks, wide.rule)
        return Maps(*(torch.where(self.is_used.view(-1, *[1] * (t.ndim - 1)), t, math.nan) for t in maps))

    def wide(self) -> Problem:
        """The same problem in float64."""
        q, k, v, g = (tensor.double() for tensor in self.tokens)
        given = (self.rule.q_weight, self.rule.k_weight, self.rule.cos, self.rule.sin)
        q_weight, k_weight, cos, sin = (None if tensor is None else tensor.double() for tensor in given)
        rule = replace(self.rule, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
        return replace(self, q=q, k=k, v=v, g=g, states=self.states.double(), rule=rule)

    def slots(self) -> tuple[Tensor, Tensor]:
        """For ``step``: reads shared between rows, of zeros too; every third row is not written."""
        size, count = len(self.states), len(self.q)
        rows = torch.arange(count, dtype=torch.int32)
        writes = torch.where(rows % 3 == 2, -1, rows + size)
        return (rows % (size + 1) - 1).to(self.q.device), writes.to(self.q.device, torch.int32)

    def pool(self) -> Tensor:
        """``states`` and one more slot per token, which is NaN."""
        fresh = self.states.new_full((len(self.q), *self.states.shape[1:]), math.nan)
        return torch.cat([self.states, fresh])


def _rule(shape: Shape, draw: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Rule:
    weights = 1 + torch.randn(2, shape.key_dim, generator=draw) / 4
    angles = torch.rand(shape.num_tokens, max(shape.num_turned, 1), generator=draw) * 6
    q_weight, k_weight = weights.to(device, dtype) if shape.has_norm else (None, None)
    cos, sin = (angles.cos().to(device), angles.sin().to(device)) if shape.num_turned else (None, None)
    return Rule(shape.silu, q_weight, k_weight, 1e-5, cos, sin, shape.key_dim**-0.5)


def chunks_of(shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """``[M, C]``; places without a token hold the number of tokens, or -1."""
    rows, token = [], 0
    for length in shape.lengths:
        own = torch.arange(token, token + length, dtype=torch.int32)
        token += length
        for chunk in torch.split(own, shape.size) if length else ():
            rows.append(torch.nn.functional.pad(chunk, (0, shape.size - len(chunk)), value=shape.num_tokens))
    rows += [torch.full((shape.size,), -1, dtype=torch.int32)] * shape.padding
    return torch.stack(rows).to(device) if rows else torch.empty(0, shape.size, dtype=torch.int32, device=device)
