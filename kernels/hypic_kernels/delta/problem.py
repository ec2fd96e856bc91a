"""Random tokens, chunks and states for tests, self-check and bench: every feature in one small problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hypic_kernels.delta import reference
from hypic_kernels.delta.rule import GatedNorm, Maps, Rule


@dataclass(frozen=True)
class Shape:
    """Chunks of ``size`` tokens cut from rows of ``lengths``, then ``padding`` chunks without a token."""

    key_dim: int
    value_dim: int
    num_k_heads: int = 1
    num_v_heads: int = 2
    size: int = 16
    lengths: tuple[int, ...] = (8, 1, 35)
    padding: int = 1

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_channels(self) -> int:
        return 2 * self.num_k_heads * self.key_dim + self.num_v_heads * self.value_dim


@dataclass(frozen=True)
class Problem:
    """Arguments of the three calls; ``states [slots, Hv, K, V]``; ``norm`` as for the tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    chunks: Tensor
    rule: Rule
    states: Tensor
    norm: GatedNorm

    @staticmethod
    def random(
        shape: Shape,
        *,
        dtype: torch.dtype = torch.float32,
        is_raw: bool = True,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Problem:
        """q, k and v are views of one projection; ``is_raw``: the gate is left to the rule, heads to its norm.

        Without it q and k are short, so that states stay small.
        """
        draw, size = torch.Generator().manual_seed(seed), shape.num_tokens

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw)

        wide = normal(size, shape.num_channels)
        if not is_raw:
            wide = wide / math.sqrt(shape.key_dim)
        q, k, v = _split(wide.to(device, dtype), shape)
        a, b = normal(size, shape.num_v_heads), normal(size, shape.num_v_heads)
        gate = torch.stack([a, b], 1).to(device, dtype)
        g, beta = (gate[:, 0], gate[:, 1]) if is_raw else ((-a.exp() / 8).to(device), b.sigmoid().to(device))
        z = normal(size, shape.num_v_heads, 2 * shape.value_dim).to(device, dtype)[..., shape.value_dim :]
        states = normal(5, shape.num_v_heads, shape.key_dim, shape.value_dim).to(device)
        weight = 1 + normal(shape.value_dim).to(device, dtype) / 4
        rule = _rule(shape, draw, device) if is_raw else Rule(scale=0.5)
        return Problem(q, k, v, g, beta, chunks_of(shape, device), rule, states, GatedNorm(z, weight, 1e-6))

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def poisoned(self, dtype: torch.dtype = torch.float32) -> Maps:
        """Outputs of ``lift``, all NaN: what is not written shows."""
        (num_chunks, size), (_, heads, value_dim) = self.chunks.shape, self.v.shape
        maps = Maps.empty(num_chunks, size, heads, self.k.shape[2], value_dim, self.v, dtype)
        for tensor in maps:
            tensor.fill_(math.nan)
        return maps

    def lifted(self) -> Maps:
        """By the reference in float64."""
        return reference.lift(*self.wide().tokens, self.chunks, self.rule)

    def wide(self) -> Problem:
        """The same problem in float64."""
        q, k, v, g, beta = (tensor.double() for tensor in self.tokens)
        norm = replace(self.norm, z=self.norm.z.double(), weight=self.norm.weight.double())
        return replace(self, q=q, k=k, v=v, g=g, beta=beta, states=self.states.double(), norm=norm)

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


def _split(wide: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = shape.num_k_heads * shape.key_dim, shape.num_v_heads * shape.value_dim
    q, k, v = torch.split(wide, [keys, keys, values], dim=-1)
    rows, by_head = len(wide), (shape.num_k_heads, shape.key_dim)
    return q.view(rows, *by_head), k.view(rows, *by_head), v.view(rows, shape.num_v_heads, shape.value_dim)


def _rule(shape: Shape, draw: torch.Generator, device: torch.device | str) -> Rule:
    A_log = (torch.rand(shape.num_v_heads, generator=draw) - 3).to(device)
    dt_bias = torch.randn(shape.num_v_heads, generator=draw).to(device)
    return Rule(normalise=True, scale=shape.key_dim**-0.5, A_log=A_log, dt_bias=dt_bias, beta_scale=1.5)


def chunks_of(shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """``[M, C]``; places without a token hold the number of tokens, or -1."""
    rows, token = [], 0
    for length in shape.lengths:
        own = torch.arange(token, token + length, dtype=torch.int32)
        token += length
        for chunk in torch.split(own, shape.size):
            rows.append(torch.nn.functional.pad(chunk, (0, shape.size - len(chunk)), value=shape.num_tokens))
    rows += [torch.full((shape.size,), -1, dtype=torch.int32)] * shape.padding
    return torch.stack(rows).to(device) if rows else torch.empty(0, shape.size, dtype=torch.int32, device=device)
