"""Runs of a step in a linear-attention layer: rows whose state is carried by the kernel that runs them.

Round after round, each row from the state that the round before left. A row that is folded has the map ``T`` that its
kernel gives and ``B = S - T S_0``, where the row led from ``S_0`` to ``S``. An interior that was begun in an earlier
step, as ``(T_1, B_1)``, goes on to ``(T T_1, S - T (S_0 - B_1))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.kernel_plan import Round
from hypic.engine.linear import RunFamily
from hypic.engine.pool import Pool
from hypic_kernels.rows import Rows

# Initial states of rows to the states after them and to the transitions of the rows that are folded.
Run = Callable[[Rows, Tensor], tuple[Tensor, Tensor]]
Runner = Literal["fla", "hypic"]


@runtime_checkable
class RunMixer(Protocol):
    """A layer that fla's kernels carry the state through long rows for."""

    def runs_rows(self) -> bool:
        """Whether they run where the layer's weights lie; the first time it is tried."""
        ...

    def run_rows(self, tokens: Any, rows: Rows, initial: Tensor) -> tuple[Tensor, Tensor]:
        """States after rows, ``[R, H, K, V]``, from those before; and transitions of the first ``rows.num_folds``.

        Outputs are filled in where ``tokens`` keep them.
        """
        ...


def runner_of(mixer: Any, device: torch.device) -> Runner | None:
    """Whose kernels carry this layer's state through long rows, if any do."""
    if isinstance(mixer, RunMixer):
        return "fla" if mixer.runs_rows() else None
    is_run = isinstance(mixer.family, RunFamily)
    return "hypic" if is_run and mixer.family.runs_rows(mixer.kept.key_dim, mixer.kept.value_dim, device) else None


def run_rounds(run: Run, rounds: Sequence[Round], pool: Pool, layer: int) -> None:
    """States of all runs, and the maps of what they fold, are written to the pool; ``run`` sees to the outputs."""
    states = pool.states[layer]
    source = states
    for round in rounds:
        before = source.index_select(0, round.initial)
        after, transitions = run(round.rows, before)
        if round.rows.num_folds:
            _write_maps(round, transitions[: round.rows.num_folds], before, after, pool, layer)
        states.index_copy_(0, round.write_slots, after.index_select(0, round.write_places))
        source = after


def _write_maps(round: Round, transitions: Tensor, before: Tensor, after: Tensor, pool: Pool, layer: int) -> None:
    start, end = before[: round.rows.num_folds], after[: round.rows.num_folds]
    made = transitions
    if round.is_continued:
        done = pool.read_map(layer, round.fold_states, round.fold_transitions)
        start, made = start - done.end_state, _acted(transitions, done.transition)
    end_state = end - _acted(transitions, start)
    pool.write_map(layer, round.fold_states, round.fold_transitions, Affine(made, end_state))


def _acted(transition: Tensor, on: Tensor) -> Tensor:
    """``T`` on a state or on a transition, in float32 proper: where torch may round to TF32, which would leave ``B``
    three digits, in float64."""
    if transition.ndim < 4:
        return transition[(...,) + (None,) * (on.ndim - transition.ndim)] * on
    if transition.is_cuda and _may_round():
        return (transition.double() @ on.double()).to(on.dtype)
    return transition @ on


def _may_round() -> bool:
    """Whether torch is told to multiply float32 as TF32; torch before 2.9 says so in another place."""
    matmul = torch.backends.cuda.matmul
    own, general = (getattr(settings, "fp32_precision", None) for settings in (matmul, torch.backends))
    return bool(matmul.allow_tf32) if own is None else "tf32" in (own, general)
