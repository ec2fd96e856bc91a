"""A linear-attention layer over a batch: lift, exclusive scan, read; the same for every family.

Rows are cut into chunks, chunks and cached interiors are maps of one kind, and one scan over each chain gives the state
before every chunk. Interiors encoded in this step are folded and written to the pool first, in their storage form, so
that a fresh entry and a stored one answer alike.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hypic.engine.affine import Affine, exclusive_scan, fold, identity
from hypic.engine.batch import Batch, ScanPlan
from hypic.engine.layers import linear_kernels
from hypic.engine.layers.chunks import chunked
from hypic.engine.layers.rotary import Angles, move
from hypic.engine.linear import LinearFamily
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
    lifted = mixer.family.lift(chunked(x, plan.chunks))
    if plan.folds.num_places:
        _write_folds(lifted.maps, plan, pool, layer)
    maps = _in_places(mixer, lifted.maps, plan, pool, layer, moves)
    states = exclusive_scan(maps, plan.schedule, stored.index_select(0, plan.initial_slots))
    stored.index_copy_(0, plan.write_slots, states.index_select(0, plan.write_places))
    outputs = lifted.read(states.index_select(0, plan.chunk_places))
    return outputs.transpose(1, 2).flatten(0, 1).index_select(0, plan.token_chunks)


def _write_folds(maps: Affine, plan: ScanPlan, pool: Pool, layer: int) -> None:
    start = pool.read_map(layer, plan.fold_states, plan.fold_transitions).where(plan.fold_begun > 0)
    folded = fold(maps[plan.fold_chunks], plan.folds, start)
    pool.write_map(layer, plan.fold_states, plan.fold_transitions, folded)


def _in_places(
    mixer: Mixer, chunk_maps: Affine, plan: ScanPlan, pool: Pool, layer: int, moves: Angles | None
) -> Affine:
    """Maps of chunks and of interiors, in the schedule's places."""
    if not len(plan.interior_places):
        places = plan.chunk_places
        return chunk_maps if len(plan.schedule.chains) == 1 else chunk_maps[_inverse(places)]
    interiors = _placed(mixer, plan, pool, layer, moves)
    return Affine(
        _scattered(chunk_maps.transition, interiors.transition, plan),
        _scattered(chunk_maps.end_state, interiors.end_state, plan),
    )


def _inverse(places: Tensor) -> Tensor:
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(len(places), device=places.device)
    return inverse


def _placed(mixer: Mixer, plan: ScanPlan, pool: Pool, layer: int, moves: Angles | None) -> Affine:
    """Interiors' maps, moved to where they stand; the ablations replace their transitions."""
    maps = pool.read_map(layer, plan.interior_states, plan.interior_transitions)
    if moves is not None:
        maps = move(maps, moves, has_channel_gate=mixer.family.has_channel_gate)
    for compose, numbers in plan.replaced.items():
        none = torch.zeros_like(maps.transition[numbers])
        maps.transition[numbers] = identity(none) if compose == "addition" else none
    return maps


def _scattered(chunks: Tensor, interiors: Tensor, plan: ScanPlan) -> Tensor:
    out = chunks.new_empty((plan.schedule.num_places, *chunks.shape[1:]))
    out.index_copy_(0, plan.chunk_places, chunks)
    out.index_copy_(0, plan.interior_places, interiors.to(out.dtype))
    return out
