"""Affine maps of recurrent states: the one monoid on which reuse rests.

A run of tokens does ``S -> T S + B`` to the state ``S`` of a linear-attention head. Maps compose:
``(T1, B1).then((T2, B2)) = (T2 T1, T2 B1 + B2)``, with ``(I, 0)`` as the identity, so pieces that
were lifted apart can be folded in any prompt order, in pieces, or in a tree (HYPIC,
arXiv 2607.01299; parallel scans: Blelloch 1990).

Shapes: ``end_state`` is ``[..., H, K, V]``; ``transition`` is ``[..., H]`` (one number a head),
``[..., H, K]`` (diagonal) or ``[..., H, K, K]`` (dense). This file knows no model and no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def act(transition: Tensor, state: Tensor) -> Tensor:
    """``T S`` for any kind of ``T``; ``state`` is ``[..., H, K, V]``."""
    missing = state.ndim - transition.ndim
    if missing == 0:
        return transition @ state
    return transition[(...,) + (None,) * missing] * state


def identity(like: Tensor) -> Tensor:
    """The identity of the kind and shape of the transition ``like``; ``like`` has a leading axis and ``H``."""
    if like.ndim == 4:
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like).clone()
    return torch.ones_like(like)


@dataclass(frozen=True)
class Affine:
    """A batch of maps ``S -> transition S + end_state``."""

    transition: Tensor
    end_state: Tensor

    def __getitem__(self, index: slice | Tensor) -> Affine:
        return Affine(self.transition[index], self.end_state[index])

    def apply(self, state: Tensor) -> Tensor:
        """The state after, given ``state`` before: ``[..., H, K, V]``."""
        if self.transition.ndim == state.ndim == 4:
            return _fused_dense(self, state)
        return act(self.transition, state) + self.end_state

    def where(self, flags: Tensor) -> Affine:
        """The maps that ``flags [n]`` name, the identity in the place of the others."""
        flagged, added = (flags.view(-1, *[1] * (tensor.ndim - 1)) for tensor in (self.transition, self.end_state))
        unit = identity(self.transition)
        return Affine(torch.where(flagged, self.transition, unit), torch.where(added, self.end_state, 0.0))

    def then(self, later: Affine) -> Affine:
        """First this map, then ``later``."""
        return Affine(_multiply(later.transition, self.transition), later.apply(self.end_state))


def _fused_dense(maps: Affine, state: Tensor) -> Tensor:
    shape = state.shape
    transition = maps.transition.reshape(-1, *maps.transition.shape[-2:])
    added = maps.end_state.reshape(-1, *shape[-2:])
    return torch.baddbmm(added, transition, state.reshape(-1, *shape[-2:])).view(shape)


def _multiply(later: Tensor, earlier: Tensor) -> Tensor:
    return later @ earlier if later.ndim == 4 else later * earlier


@dataclass(frozen=True)
class Schedule:
    """The order in which chains of maps are walked side by side.

    Chains are sorted by falling length, so that the chains still running at step ``p`` are the
    first ``widths[p]``. Maps are laid out step by step: the map of sorted chain ``c`` at step ``p``
    stands at ``offsets[p] + c``, its *place*. ``chains[c]`` is the original number of sorted chain ``c``.
    """

    widths: tuple[int, ...]
    offsets: tuple[int, ...]
    chains: tuple[int, ...]

    @property
    def num_places(self) -> int:
        return self.offsets[-1] if self.offsets else 0

    @staticmethod
    def of(lengths: Sequence[int]) -> Schedule:
        """For chains of ``lengths`` maps each."""
        order = sorted(range(len(lengths)), key=lambda c: -lengths[c])
        longest = max(lengths, default=0)
        widths = [sum(length > p for length in lengths) for p in range(longest)]
        offsets = [0]
        for width in widths:
            offsets.append(offsets[-1] + width)
        return Schedule(tuple(widths), tuple(offsets), tuple(order))

    def places(self, chain: int, length: int) -> list[int]:
        """Places of the maps of the original chain ``chain``."""
        column = self.chains.index(chain)
        return [self.offsets[p] + column for p in range(length)]


def exclusive_scan(maps: Affine, schedule: Schedule, state: Tensor) -> Tensor:
    """States before every map, then the states after the last map of every chain.

    ``maps`` lie in the schedule's places, ``[num_places, ...]``; ``state`` is the state each sorted
    chain starts from, ``[num_chains, H, K, V]``. Returns ``[num_places + num_chains, H, K, V]``.
    Not differentiable: every state is written where it belongs.
    """
    places, heads = schedule.num_places, state.shape[1]
    states = state.new_empty((places + len(schedule.chains), *state.shape[1:]))
    states[places:] = state
    if schedule.widths:
        states[: schedule.widths[0]] = state[: schedule.widths[0]]
    flat = states.view(-1, *state.shape[2:])
    steps = _Steps(*_flattened(maps), flat, is_dense=maps.transition.ndim == 4)
    for step, width in enumerate(schedule.widths):
        remaining = schedule.widths[step + 1] if step + 1 < len(schedule.widths) else 0
        start, after = schedule.offsets[step] * heads, schedule.offsets[step + 1] * heads
        steps.run(start, after, remaining * heads)
        steps.run(start + remaining * heads, (places + remaining) * heads, (width - remaining) * heads)
    return states


@dataclass(frozen=True)
class _Steps:
    """One step of the scan writes the next states where they belong: heads are rows, ``[rows, K, V]``."""

    transition: Tensor
    end_state: Tensor
    states: Tensor
    is_dense: bool

    def run(self, start: int, target: int, count: int) -> None:
        """``count`` rows from ``start`` on, to ``target`` on."""
        if count == 0:
            return
        here, there = slice(start, start + count), self.states[target : target + count]
        if self.is_dense:
            torch.baddbmm(self.end_state[here], self.transition[here], self.states[here], out=there)
        else:
            torch.addcmul(self.end_state[here], self.transition[here], self.states[here], out=there)


def _flattened(maps: Affine) -> tuple[Tensor, Tensor]:
    """Heads as rows: transitions ``[rows, K, K]``, ``[rows, K, 1]`` or ``[rows, 1, 1]``, and ``[rows, K, V]``."""
    transition, end_state = maps.transition.flatten(0, 1), maps.end_state.flatten(0, 1)
    return transition[(...,) + (None,) * (3 - transition.ndim)], end_state


def fold(maps: Affine, schedule: Schedule, start: Affine) -> Affine:
    """The product of every chain's maps behind ``start``: one map per sorted chain."""
    done = start
    for step, width in enumerate(schedule.widths):
        here = slice(schedule.offsets[step], schedule.offsets[step] + width)
        head = done[:width].then(maps[here])
        done = head if width == len(schedule.chains) else _replace_head(done, head, width)
    return done


def _replace_head(maps: Affine, head: Affine, width: int) -> Affine:
    return Affine(
        torch.cat([head.transition, maps.transition[width:]]), torch.cat([head.end_state, maps.end_state[width:]])
    )
