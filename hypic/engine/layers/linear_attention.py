"""A linear-attention layer over a batch: lift, exclusive scan, read; the same for every family.

Rows are cut into chunks, chunks and cached interiors are maps of one kind, and one scan over each chain gives the state
before every chunk. Interiors encoded in this step are folded and written to the pool first, in their storage form, so
that a fresh entry and a stored one answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hypic.engine.affine import Affine, between, identity, product, scan
from hypic.engine.batch import Batch, ScanPlan
from hypic.engine.layers import linear_kernels
from hypic.engine.layers.chunks import chunked
from hypic.engine.layers.rotary import Angles, move
from hypic.engine.linear import Lifted, LinearFamily
from hypic.engine.pool import Pool


class Mixer(Protocol):
    """What a linear-attention layer adds to the family's recurrence; tensors are flat over tokens, ``[N, ...]``."""

    family: LinearFamily[Any]

    def convolve(self, projected: Any, batch: Batch, pool: Pool, layer: int) -> Any:
        """The projections behind their short convolution, if the layer has one."""
        ...

    def project(self, hidden: Tensor) -> Any: ...

    def inputs(self, projected: Any, angles: Angles | None) -> Any:
        """The family's inputs, ``[N, H, ...]``."""
        ...

    def output(self, mixed: Tensor, projected: Any) -> Tensor:
        """``mixed [N, H, V]`` -> ``[N, hidden]``."""
        ...


def mix(
    mixer: Mixer, hidden: Tensor, batch: Batch, pool: Pool, layer: int, angles: Angles | None, moves: Angles | None
) -> Tensor:
    """Run linear layer number ``layer`` on ``hidden [N, hidden]``; ``angles`` of tokens and ``moves`` of interiors are
    for rotary keys only."""
    if batch.kernels is not None:
        return linear_kernels.mix(mixer, mixer.project(hidden), batch, pool, layer, angles, moves)
    projected = mixer.convolve(mixer.project(hidden), batch, pool, layer)
    x = mixer.inputs(projected, angles)
    mixed = _step(mixer, x, batch, pool, layer) if batch.is_decode else _scan(mixer, x, batch, pool, layer, moves)
    return mixer.output(mixed, projected)


def _step(mixer: Mixer, x: Any, batch: Batch, pool: Pool, layer: int) -> Tensor:
    plan, states = batch.scan, pool.states[layer]
    assert plan is not None, "a step without kernels has a plan of its scans"
    mixed, after = mixer.family.step(x, states.index_select(0, plan.initial_slots))
    states.index_copy_(0, plan.write_slots, after)
    return mixed


def _scan(mixer: Mixer, x: Any, batch: Batch, pool: Pool, layer: int, moves: Angles | None) -> Tensor:
    plan, stored = batch.scan, pool.states[layer]
    assert plan is not None, "a step without kernels has a plan of its scans"
    lifted = [mixer.family.lift(chunked(x, chunks)) for chunks in plan.chunks]
    states = stored.new_empty((plan.num_places, *stored.shape[1:]))
    states.index_copy_(0, plan.starts, stored.index_select(0, plan.initial_slots))
    _encode(lifted, states, plan, pool, layer)
    if plan.requests:
        interiors = _placed(mixer, plan, pool, layer, moves)
        scan([*(one.maps for one in lifted), interiors], plan.requests, states)
    stored.index_copy_(0, plan.write_slots, states.index_select(0, plan.write_places))
    return _read(lifted, states).index_select(0, plan.token_chunks)


def _read(lifted: Sequence[Lifted], states: Tensor) -> Tensor:
    """Outputs of all chunks in a row, ``[tokens, H, V]``; the states before them come first, in their order."""
    outputs, first = [], 0
    for one in lifted:
        read = one.read(states[first : first + len(one.query)])
        outputs.append(read.transpose(1, 2).flatten(0, 1))
        first += len(read)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _encode(lifted: Sequence[Lifted], states: Tensor, plan: ScanPlan, pool: Pool, layer: int) -> None:
    """Chains that encode, and what is folded of them, into the pool."""
    if not len(plan.fold_states):
        return
    known = pool.read_map(layer, plan.interior_states[: plan.num_known], plan.interior_transitions[: plan.num_known])
    scan([*(one.maps for one in lifted), known], plan.encodes, states)
    transition = product([one.maps.transition for one in lifted], plan.factors, len(plan.fold_states))
    before, after = states.index_select(0, plan.fold_before), states.index_select(0, plan.fold_after)
    folded = between(before, transition, after)
    if len(plan.continued):
        _continue(folded, plan, pool, layer)
    pool.write_map(layer, plan.fold_states, plan.fold_transitions, folded)


def _continue(folded: Affine, plan: ScanPlan, pool: Pool, layer: int) -> None:
    """Those of which a part was folded in earlier steps, behind that part; in place."""
    which = plan.continued
    earlier = pool.read_map(layer, plan.fold_states[which], plan.fold_transitions[which])
    whole = earlier.then(folded[which])
    folded.transition[which], folded.end_state[which] = whole.transition, whole.end_state


def _placed(mixer: Mixer, plan: ScanPlan, pool: Pool, layer: int, moves: Angles | None) -> Affine:
    """Interiors' maps, moved to where they stand; the ablations replace their transitions."""
    maps = pool.read_map(layer, plan.interior_states, plan.interior_transitions)
    if moves is not None:
        maps = move(maps, moves, has_channel_gate=mixer.family.has_channel_gate)
    for compose, numbers in plan.replaced.items():
        none = torch.zeros_like(maps.transition[numbers])
        maps.transition[numbers] = identity(none) if compose == "addition" else none
    return maps
