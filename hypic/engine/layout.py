"""What a model keeps of a text, by shapes: its linear layers' states and transitions, its attention layers' K and V."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

TransitionKind = Literal["head", "diagonal", "dense"]


@dataclass(frozen=True)
class LinearShape:
    """One linear-attention layer: its state is ``[H, K, V]``, its tail ``[conv_width - 1, conv_channels]``."""

    num_heads: int
    key_dim: int
    value_dim: int
    transition: TransitionKind
    conv_channels: int = 0
    conv_width: int = 1

    @property
    def transition_shape(self) -> tuple[int, ...]:
        kinds = {"head": (), "diagonal": (self.key_dim,), "dense": (self.key_dim, self.key_dim)}
        return (self.num_heads, *kinds[self.transition])

    @property
    def tail_shape(self) -> tuple[int, int]:
        return (self.conv_width - 1, self.conv_channels)


@dataclass(frozen=True)
class AttentionShape:
    """One full-attention layer: ``K [n, num_kv_heads, key_dim]``, ``V [n, num_kv_heads, value_dim]``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Layout:
    """What a model keeps: shapes of its linear and full-attention layers, in order of depth. Sums over layers are asked
    for with every segment, and made once."""

    linear: tuple[LinearShape, ...]
    attention: tuple[AttentionShape, ...]
    dtype: torch.dtype
    state_dtype: torch.dtype

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.linear, self.attention, self.dtype, self.state_dtype))

    @cached_property
    def conv_width(self) -> int:
        return max((shape.conv_width for shape in self.linear), default=1)

    @cached_property
    def key_dim(self) -> int:
        """The widest key of the linear layers' heads."""
        return max((shape.key_dim for shape in self.linear), default=64)

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """Of every linear layer, as the next two."""
        return [(s.num_heads, s.key_dim, s.value_dim) for s in self.linear]

    @property
    def tail_shapes(self) -> list[tuple[int, ...]]:
        return [s.tail_shape for s in self.linear]

    @property
    def transition_shapes(self) -> list[tuple[int, ...]]:
        return [s.transition_shape for s in self.linear]

    @property
    def key_shapes(self) -> list[tuple[int, ...]]:
        """Of a token in every full-attention layer, as the next."""
        return [(a.num_kv_heads, a.key_dim) for a in self.attention]

    @property
    def value_shapes(self) -> list[tuple[int, ...]]:
        return [(a.num_kv_heads, a.value_dim) for a in self.attention]

    @cached_property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return sum(a.num_kv_heads * (a.key_dim + a.value_dim) for a in self.attention) * self.dtype.itemsize

    @cached_property
    def state_bytes(self) -> int:
        """One state slot: states and convolution tails of all layers."""
        states = sum(s.num_heads * s.key_dim * s.value_dim for s in self.linear) * self.state_dtype.itemsize
        return states + sum(math.prod(s.tail_shape) for s in self.linear) * self.dtype.itemsize

    @cached_property
    def transition_bytes(self) -> int:
        """One transition slot: transitions of all layers."""
        return sum(math.prod(s.transition_shape) for s in self.linear) * self.state_dtype.itemsize
