"""One tensor for all layers of one shape: what is done to one slot of each of them is few operations, not one a layer.

A layer's own tensor ``[slots, ...]`` is a view of it that begins at a multiple of 512 bytes, as a tensor that was
allocated by itself would, so kernels are compiled for one alignment only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BEGINS_AT_BYTES = 512
_WORD = torch.int64
Empty = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True)
class Group:
    """The ``layers`` whose tensors are ``[slots, *shape]``."""

    layers: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stack:
    """``whole [L, slots, *shape]``: the layers of a group, in their order."""

    group: Group
    whole: Tensor

    def at(self, slot: int) -> tuple[Tensor, ...]:
        """One slot in every layer, ``[*shape]`` each; views."""
        return self.whole.select(1, slot).unbind(0)


class Copies:
    """Only tensors of one type are copied by one kernel on a GPU, others one by one: so they are copied by type."""

    def __init__(self) -> None:
        self._by_dtype: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
        """All of one type, as many of the one as of the other, and some."""
        known = self._by_dtype.setdefault((targets[0].dtype, sources[0].dtype), ([], []))
        known[0].extend(targets)
        known[1].extend(sources)

    def run(self) -> None:
        for targets, sources in self._by_dtype.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def grouped(shapes: Sequence[tuple[int, ...]]) -> tuple[Group, ...]:
    """Layers by shape, in order of the first of each."""
    found: dict[tuple[int, ...], list[int]] = {}
    for layer, shape in enumerate(shapes):
        found.setdefault(tuple(shape), []).append(layer)
    return tuple(Group(tuple(layers), shape) for shape, layers in found.items())


def stacked(shapes: Sequence[tuple[int, ...]], slots: int, dtype: torch.dtype, empty: Empty) -> tuple[Stack, ...]:
    """Memory for layers of these shapes, not written yet; ``empty`` makes it, of a shape and a type."""
    return tuple(Stack(group, _whole(group, slots, dtype, empty)) for group in grouped(shapes))


def by_layer(stacks: Sequence[Stack]) -> list[Tensor]:
    """``[slots, *shape]`` of every layer; views."""
    found = {layer: part for stack in stacks for layer, part in zip(stack.group.layers, stack.whole, strict=True)}
    return [found[layer] for layer in sorted(found)]


def words(rows: Tensor) -> Tensor:
    """``rows [L, n, ...]`` as ``[L, n, w]`` of 64-bit words if a row is some of them, for whatever copies them."""
    flat = rows.flatten(2)
    is_words = flat.shape[2] * flat.element_size() % _WORD.itemsize == 0 and flat.shape[2] > 0
    return flat.view(_WORD) if is_words else flat


def _whole(group: Group, slots: int, dtype: torch.dtype, empty: Empty) -> Tensor:
    shape = (slots, *group.shape)
    unit = BEGINS_AT_BYTES // dtype.itemsize
    size = -(-math.prod(shape) // unit) * unit
    memory = empty((len(group.layers), size), dtype)
    return memory[:, : math.prod(shape)].view(len(group.layers), *shape)
