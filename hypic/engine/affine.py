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
from typing import NamedTuple, TypeVar

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


class Move(NamedTuple):
    """``num`` maps from ``row`` of a source on, applied to the states at ``before`` on, which gives those at
    ``after`` on."""

    source: int
    row: int
    before: int
    after: int
    num: int


class Factor(NamedTuple):
    """``num`` transitions from ``row`` of a source on, behind the products in ``column`` on, or the first there."""

    source: int
    row: int
    column: int
    num: int
    is_first: bool


Run = TypeVar("Run", Move, Factor)


def merged(runs: Sequence[Run]) -> list[Run]:
    """Runs of which each begins where the one before it ends, in all its places, as one."""
    found: list[Run] = []
    for run in runs:
        if found and _behind(found[-1]) == run._replace(num=found[-1].num):
            found[-1] = found[-1]._replace(num=found[-1].num + run.num)
        else:
            found.append(run)
    return found


def _behind(run: Run) -> Run:
    if isinstance(run, Move):
        return run._replace(row=run.row + run.num, before=run.before + run.num, after=run.after + run.num)
    return run._replace(row=run.row + run.num, column=run.column + run.num)


def scan(sources: Sequence[Affine], moves: Sequence[Move], states: Tensor) -> None:
    """States before and after every map, into ``states [P, H, K, V]``, which holds those that chains start from.

    Moves stand in an order in which what one needs was made before it. Not differentiable: every state is written where
    it belongs.
    """
    heads, flat = states.shape[1], states.view(-1, *states.shape[2:])
    flattened = [_flattened(maps) for maps in sources]
    for source, row, before, after, num in moves:
        (transition, end_state), rows = flattened[source], slice(row * heads, (row + num) * heads)
        here, there = (flat[place * heads : (place + num) * heads] for place in (before, after))
        apply = torch.baddbmm if sources[source].transition.ndim == 4 else torch.addcmul
        apply(end_state[rows], transition[rows], here, out=there)


def _flattened(maps: Affine) -> tuple[Tensor, Tensor]:
    """Heads as rows: transitions ``[rows, K, K]``, ``[rows, K, 1]`` or ``[rows, 1, 1]``, and ``[rows, K, V]``."""
    transition, end_state = maps.transition.flatten(0, 1), maps.end_state.flatten(0, 1)
    return transition[(...,) + (None,) * (3 - transition.ndim)], end_state


def product(sources: Sequence[Tensor], factors: Sequence[Factor], num_columns: int) -> Tensor:
    """Products of transitions ``[num_columns, H, ...]``, the identity in columns without any."""
    done = sources[0].new_empty((num_columns, *sources[0].shape[1:]))
    if sum(factor.num for factor in factors if factor.is_first) < num_columns:
        done = identity(done)
    for source, row, column, num, is_first in factors:
        here, there = sources[source][row : row + num], done[column : column + num]
        there.copy_(here if is_first else _multiply(here, there))
    return done


def between(before: Tensor, transition: Tensor, after: Tensor) -> Affine:
    """The map with this transition that leads from states ``before`` to those ``after``: ``B = S - T S_0``."""
    return Affine(transition, after - act(transition, before))
