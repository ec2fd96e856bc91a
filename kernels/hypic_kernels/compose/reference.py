"""What ``compose`` means: the exclusive scan over chains of maps ``S -> T S + B``, one map after the other.

Plain torch, any device and floating type, differentiable; the definition that the kernel is tested against. Not fast:
it visits every element from Python and waits for the device once per call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hypic_kernels.compose.chains import IDENTITY, STILL, ZERO, Chains, Turns


def compose(
    chains: Chains,
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor] | None,
    initial: Tensor,
    before: Tensor,
    final: Tensor,
    turns: Turns | None = None,
) -> None:
    """Writes the wanted states before elements into ``before`` and those after the last ones into ``final``.

    Arguments as in ``hypic_kernels.compose.compose``; computes in the type of ``final``. Without ``end_states``,
    ``B = 0`` throughout.
    """
    bounds, elements = chains.cu_elements.tolist(), chains.elements.tolist()
    rows = [STILL] * len(elements) if turns is None else turns.rows.tolist()
    for chain, slot in enumerate(chains.initial_index.tolist()):
        state = torch.zeros_like(final[chain]) if slot == ZERO else initial[slot].to(final.dtype)
        for number in range(bounds[chain], bounds[chain + 1]):
            source, transition, end_state, output = elements[number]
            if output >= 0:
                before[output] = state
            state = _acted(transitions[source], transition, state)
            if end_states is not None:
                state = state + _turned(end_states[source][end_state].to(final.dtype), turns, rows[number])
        final[chain] = state


def _acted(transitions: Tensor, index: int, state: Tensor) -> Tensor:
    """``T S``; a transition that is zero shuts out whatever the state holds, NaN included."""
    if index == ZERO:
        return torch.zeros_like(state)
    if index == IDENTITY:
        return state
    transition = transitions[index].to(state.dtype)
    if transition.ndim == state.ndim:
        return transition @ state
    return transition[(...,) + (None,) * (state.ndim - transition.ndim)] * state


def _turned(end_state: Tensor, turns: Turns | None, row: int) -> Tensor:
    """``end_state [H, K, V]`` rotated along ``K``."""
    if turns is None or row == STILL:
        return end_state
    cos, sin = (angles[row].to(end_state.dtype)[:, None] for angles in (turns.cos, turns.sin))
    half = len(cos)
    first, second = end_state[:, :half], end_state[:, half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, end_state[:, 2 * half :]], dim=1)


def write_rows(source: Tensor, places: Tensor, target: Tensor, slots: Tensor) -> None:
    """``target[slots[p]] = source[places[p]]`` where the slot is not negative."""
    kept = slots >= 0
    target[slots[kept].long()] = source[places[kept].long()].to(target.dtype)
