"""A linear-attention layer over a batch by kernels: the same lift, scan and read as ``linear_attention``, on indices.

Maps of chunks and of cached interiors stay where they are; one ragged scan walks both. A layer with kernels for its own
recurrence lifts and reads with them (``FusedMixer``); any other is lifted by its family in torch. Runs go first, by
kernels that carry the state (``linear_runs``): what they fold may be read in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.batch import Batch
from hypic.engine.kernel_plan import KernelPlan, Runs
from hypic.engine.layers.chunks import chunked
from hypic.engine.layers.linear_runs import RunMixer, is_run_mixer, offers, run_all
from hypic.engine.layers.rotary import Angles, move
from hypic.engine.linear import LinearFamily
from hypic.engine.pool import Pool
from hypic_kernels import compose

# Dense products on matrix units that keep about as many digits as float32.
PRECISION: compose.Precision = "tf32x3"


class FusedMixer(Protocol):
    """A layer whose recurrence has kernels; from raw projections to outputs ``[N, hidden]``, states in float32.

    ``angles`` are the tokens', in layers with rotary keys.
    """

    family: LinearFamily[Any]

    def lift_rows(
        self, projected: Any, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None
    ) -> tuple[Affine, Callable[[Tensor], Tensor]]:
        """Maps of chunks ``[M, H, ...]``, and what gives the outputs from the states before them ``[M, H, K, V]``."""
        ...

    def step_rows(self, projected: Any, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None) -> Tensor:
        """One token a chain; the pool's states are moved on in place."""
        ...


class ScanningMixer(Protocol):
    """A fused mixer that has, besides, one kernel for lift, scan and read together."""

    def scan_rows(self, projected: Any, plan: KernelPlan, pool: Pool, layer: int) -> Tensor | None:
        """Outputs at once, states written to the pool; None where maps of chunks are wanted or the better way."""
        ...


def is_fused(mixer: Any) -> TypeGuard[FusedMixer]:
    """Whether a layer is a ``FusedMixer``."""
    return offers(mixer, "lift_rows", "step_rows")


def _scans(mixer: Any) -> TypeGuard[ScanningMixer]:
    return offers(mixer, "scan_rows")


def mix(
    mixer: Any, projected: Any, batch: Batch, pool: Pool, layer: int, angles: Angles | None, moves: Angles | None
) -> Tensor:
    """Outputs ``[N, hidden]`` of linear layer number ``layer``, from its raw projections."""
    plan = batch.kernels
    assert plan is not None, "the step was not planned for kernels"
    if is_fused(mixer):
        return _fused(mixer, projected, batch, plan, pool, layer, angles, moves)
    projected = mixer.convolve(projected, batch, pool, layer)
    x = mixer.inputs(projected, angles)
    mixed = _step(mixer, x, plan, pool, layer) if batch.is_decode else _scan(mixer, x, plan, pool, layer, moves)
    return mixer.output(mixed, projected)  # type: ignore[no-any-return]


def _fused(
    mixer: FusedMixer, projected: Any, batch: Batch, plan: KernelPlan, pool: Pool, layer: int, angles: Angles | None,
    moves: Angles | None,
) -> Tensor:  # fmt: skip
    if batch.is_decode:
        return mixer.step_rows(projected, plan, pool, layer, angles)
    if plan.runs is not None:
        assert is_run_mixer(mixer), "runs were planned for a layer that has no kernel for them"
        return _with_runs(mixer, projected, plan, plan.runs, pool, layer)
    if plan.folds is None and not plan.gathers and _scans(mixer):
        outputs = mixer.scan_rows(projected, plan, pool, layer)
        if outputs is not None:
            return outputs
    maps, read = mixer.lift_rows(projected, plan, pool, layer, angles)
    return read(scan(maps, plan, pool, layer, moves, mixer.family.has_channel_gate)[: len(plan.chunks)])


def _with_runs(mixer: RunMixer, projected: Any, plan: KernelPlan, runs: Runs, pool: Pool, layer: int) -> Tensor:
    rows = mixer.rows(projected, plan, pool, layer)
    run_all(mixer, rows, runs, pool, layer)
    if plan.chunks.shape[0] and not mixer.scan_chunks(rows, plan, pool, layer):
        maps, fill = mixer.lift_chunks(rows, plan.chunks)
        fill(scan(maps, plan, pool, layer, None, False)[: len(plan.chunks)])
    return mixer.project_back(rows)


def _step(mixer: Any, x: Any, plan: KernelPlan, pool: Pool, layer: int) -> Tensor:
    states = pool.states[layer]
    mixed, after = mixer.family.step(x, states.index_select(0, plan.initial_slots))
    states.index_copy_(0, plan.write_slots, after)
    return mixed  # type: ignore[no-any-return]


def _scan(mixer: Any, x: Any, plan: KernelPlan, pool: Pool, layer: int, moves: Angles | None) -> Tensor:
    lifted = mixer.family.lift(chunked(x, plan.chunks))
    states = scan(lifted.maps, plan, pool, layer, moves, mixer.family.has_channel_gate)
    outputs = lifted.read(states[: len(plan.chunks)]).transpose(1, 2).flatten(0, 1)
    return outputs.index_select(0, plan.token_chunks)  # type: ignore[no-any-return]


def scan(maps: Affine, plan: KernelPlan, pool: Pool, layer: int, moves: Angles | None, has_gate: bool) -> Tensor:
    """States ``[before | final]`` of all chains, given the chunks' maps; entries and states are written to the pool."""
    if plan.folds is not None:
        _write_folds(maps, plan, pool, layer)
    entries = _placed(plan, pool, layer, moves, has_gate)
    num, stored = plan.num_outputs, pool.states[layer]
    states = stored.new_empty((num + plan.chains.num_chains, *stored.shape[1:]))
    compose.compose(
        plan.chains,
        [maps.transition.contiguous(), entries.transition],
        [maps.end_state.contiguous(), entries.end_state],
        stored,
        before=states[:num],
        final=states[num:],
        precision=PRECISION,
        turns=None if moves is None or plan.gathers else compose.Turns(plan.element_turns, moves.cos, moves.sin),
    )
    compose.write_rows(states, plan.write_places, stored, plan.write_slots)
    return states


def _placed(plan: KernelPlan, pool: Pool, layer: int, moves: Angles | None, has_gate: bool) -> Affine:
    """Entries' maps as the chains name them: where they are stored, or gathered and moved to where they stand."""
    if moves is None or not plan.gathers:
        return Affine(pool.transitions[layer], pool.states[layer])
    gathered = pool.read_map(layer, plan.interior_states, plan.interior_transitions)
    moved = move(gathered, moves, has_channel_gate=has_gate)
    return Affine(moved.transition.contiguous(), moved.end_state.contiguous())


def _write_folds(maps: Affine, plan: KernelPlan, pool: Pool, layer: int) -> None:
    assert plan.folds is not None, "nothing is encoded in this step"
    transition, end_state = compose.fold(
        plan.folds.chains,
        [maps.transition.contiguous(), pool.transitions[layer]],
        [maps.end_state.contiguous(), pool.states[layer]],
        precision=PRECISION,
    )
    pool.write_map(layer, plan.folds.states, plan.folds.transitions, Affine(transition, end_state))
