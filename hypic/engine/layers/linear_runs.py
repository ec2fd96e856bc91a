"""Runs of a step in a linear-attention layer: rows whose state is carried by the kernel that runs them.

All rows at once, each from its first token to its last. An interior has the map ``T`` that the kernel gives of its part
of a row, and ``B = S - T S_0``, where the part led from ``S_0`` to ``S``. An interior that was begun in an earlier
step, as ``(T_1, B_1)``, goes on to ``(T T_1, S - T (S_0 - B_1))``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.kernel_plan import KernelPlan, Runs
from hypic.engine.pool import Pool
from hypic_kernels import delta
from hypic_kernels.rows import Rows


class RunMixer(Protocol):
    """A layer with a kernel that carries the state through long rows."""

    def runs_rows(self) -> bool:
        """Whether the kernel runs where the layer's weights lie; the first time it is tried."""
        ...

    def rows(self, projected: Any, plan: KernelPlan, pool: Pool, layer: int) -> Any:
        """The step's tokens behind their convolution, and room for the outputs of their heads."""
        ...

    def run_rows(
        self, tokens: Any, rows: Rows, initial: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """States that ``rows`` keep ``[P + R, H, K, V]``, from those in a pool, ``initial``: the pool and slots in it;
        and transitions, which go ``into`` a pool, or are given alone.

        Outputs are filled in where ``tokens``, which ``rows`` gave, keep them.
        """
        ...

    def scan_chunks(self, rows: Any, plan: KernelPlan, pool: Pool, layer: int) -> bool:
        """All of the chains that are no runs in one kernel: outputs are filled in, states written to the pool. False:
        nothing is done, for maps of chunks are wanted or the better way."""
        ...

    def lift_chunks(self, rows: Any, chunks: Tensor) -> tuple[Affine, Callable[[Tensor], None]]:
        """Maps of ``chunks``, ``[M, H, ...]``, and what fills in the outputs of their tokens, given the states before
        them ``[M, H, K, V]``."""
        ...

    def project_back(self, rows: Any) -> Tensor:
        """``[N, hidden]``, once the outputs of all tokens are filled in."""
        ...


def is_run_mixer(mixer: Any) -> TypeGuard[RunMixer]:
    """Whether a layer is a ``RunMixer``."""
    return offers(mixer, "runs_rows", "run_rows")


def offers(mixer: Any, *names: str) -> bool:
    """Whether a layer's class has methods of these names: looked at once, since every layer of every step asks."""
    kind: Any = type(mixer)
    return _offers(kind, names)


@functools.cache
def _offers(kind: type, names: tuple[str, ...]) -> bool:
    return all(callable(getattr(kind, name, None)) for name in names)


def run_all(mixer: RunMixer, tokens: Any, runs: Runs, pool: Pool, layer: int) -> None:
    """Outputs of all runs; their states, and the maps of what they fold, are written to the pool."""
    states, initial = pool.states[layer], (pool.states[layer], runs.initial)
    if runs.is_continued or not pool.form.is_lossless:
        kept, transitions = mixer.run_rows(tokens, runs.rows, initial, None)
        _write_maps(runs, transitions, kept, pool, layer)
        states.index_copy_(0, runs.write_slots.long(), kept.index_select(0, runs.write_places))
        return
    made = pool.transitions[layer], runs.fold_transitions
    kept, _ = mixer.run_rows(tokens, runs.rows, initial, made)
    delta.settle(kept, made, runs.fold_ends, runs.fold_states, (runs.write_places, runs.write_slots), states)


def _write_maps(runs: Runs, transitions: Tensor, kept: Tensor, pool: Pool, layer: int) -> None:
    if not runs.rows.num_folds:
        return
    start, end = (kept.index_select(0, places) for places in runs.fold_ends.T.contiguous())
    states, slots = runs.fold_states.long(), runs.fold_transitions.long()
    made = transitions
    if runs.is_continued:
        done = pool.read_map(layer, states, slots).where(runs.fold_begun > 0)
        start, made = start - done.end_state, _product(transitions, done.transition)
    end_state = end - _product(transitions, start)
    pool.write_map(layer, states, slots, Affine(made, end_state))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In float32 proper: where torch may round to TF32, which would leave ``B`` three digits, in float64."""
    if left.is_cuda and _may_round():
        return (left.double() @ right.double()).to(right.dtype)
    return left @ right


def _may_round() -> bool:
    """Whether torch is told to multiply float32 as TF32; torch before 2.9 says so in another place."""
    matmul = torch.backends.cuda.matmul
    own, general = (getattr(settings, "fp32_precision", None) for settings in (matmul, torch.backends))
    return bool(matmul.allow_tf32) if own is None else "tf32" in (own, general)
