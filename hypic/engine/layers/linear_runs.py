"""Runs of a step in a linear-attention layer: rows whose state is carried by the kernel that runs them.

Round after round, each row from the state that the round before left. A row that is folded has the map ``T`` that its
kernel gives and ``B = S - T S_0``, where the row led from ``S_0`` to ``S``. An interior that was begun in an earlier
step, as ``(T_1, B_1)``, goes on to ``(T T_1, S - T (S_0 - B_1))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.kernel_plan import KernelPlan, Round
from hypic.engine.pool import Pool
from hypic_kernels.rows import Rows


@runtime_checkable
class RunMixer(Protocol):
    """A layer with a kernel that carries the state through long rows."""

    def runs_rows(self) -> bool:
        """Whether the kernel runs where the layer's weights lie; the first time it is tried."""
        ...

    def rows(self, projected: Any, plan: KernelPlan, pool: Pool, layer: int) -> Any:
        """The step's tokens behind their convolution, and room for the outputs of their heads."""
        ...

    def run_rows(self, tokens: Any, rows: Rows, initial: Tensor) -> tuple[Tensor, Tensor]:
        """States after rows, ``[R, H, K, V]``, from those before; and transitions of the first ``rows.num_folds``.

        Outputs are filled in where ``tokens``, which ``rows`` gave, keep them.
        """
        ...

    def lift_chunks(self, rows: Any, chunks: Tensor) -> tuple[Affine, Callable[[Tensor], None]]:
        """Maps of ``chunks``, ``[M, H, ...]``, and what fills in the outputs of their tokens, given the states before
        them ``[M, H, K, V]``."""
        ...

    def project_back(self, rows: Any) -> Tensor:
        """``[N, hidden]``, once the outputs of all tokens are filled in."""
        ...


def run_rounds(mixer: RunMixer, tokens: Any, rounds: Sequence[Round], pool: Pool, layer: int) -> None:
    """Outputs of all runs; their states, and the maps of what they fold, are written to the pool."""
    states = pool.states[layer]
    source = states
    for round in rounds:
        before = source.index_select(0, round.initial)
        after, transitions = mixer.run_rows(tokens, round.rows, before)
        if round.rows.num_folds:
            _write_maps(round, transitions, before, after, pool, layer)
        states.index_copy_(0, round.write_slots, after.index_select(0, round.write_places))
        source = after


def _write_maps(round: Round, transitions: Tensor, before: Tensor, after: Tensor, pool: Pool, layer: int) -> None:
    start, end = before[: round.rows.num_folds], after[: round.rows.num_folds]
    made = transitions
    if round.is_continued:
        done = pool.read_map(layer, round.fold_states, round.fold_transitions)
        start, made = start - done.end_state, _product(transitions, done.transition)
    end_state = end - _product(transitions, start)
    pool.write_map(layer, round.fold_states, round.fold_transitions, Affine(made, end_state))


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
