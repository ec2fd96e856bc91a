"""The kernel is its reference's twin in Triton's interpreter; the reference by hand, and what the tests would see."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from hypic_kernels import available, interpreted
from hypic_kernels.compose import (
    IDENTITY,
    NOT_WANTED,
    STILL,
    ZERO,
    Backend,
    Chains,
    ChainsError,
    Config,
    compose,
    write_rows,
)
from hypic_kernels.compose.check import TOLERANCE, Variant, WriteVariant, measure
from hypic_kernels.compose.layout import KINDS, Kind
from hypic_kernels.compose.problem import Problem, relative_error
from tests.kernels.compose_checks import BATCHES, assert_shut_out, check_fold, kernel_error

F32, BF16 = torch.float32, torch.bfloat16

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)


# -- in the interpreter: fp32 arithmetic ---------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize("stored", [(F32,), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 17), (5, 3), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_reference(kind: Kind, key_dim: int, value_dim: int, stored: tuple[torch.dtype, ...]) -> None:
    assert kernel_error(Problem.random(kind, key_dim, value_dim, dtypes=stored)) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_kernel_walks_ragged_chains(lengths: tuple[int, ...]) -> None:
    assert kernel_error(Problem.random("dense", 16, 16, lengths=lengths, num_heads=1)) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("config", [Config(16, 4, 1, 1), Config(32, 8, 3, 2), Config(16, 4, 5, 4), Config(64, 8, 3, 4)])
def test_kernel_is_the_same_in_any_layout(config: Config) -> None:
    problem = Problem.random("dense", 50, 50, lengths=(2, 1), num_heads=1)
    assert kernel_error(problem, config=config) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("config", [None, Config(16, 4, 1, block_k=16), Config(32, 8, 3, block_k=64)])
@pytest.mark.parametrize(("key_dim", "value_dim", "num_turned"), [(40, 17, 20), (40, 40, 8), (5, 3, 1)])
def test_end_states_are_rotated_as_they_are_read(
    key_dim: int, value_dim: int, num_turned: int, config: Config | None
) -> None:
    for stored in ((F32,), (F32, F32), (F32, BF16)):
        still = Problem.random("head", key_dim, value_dim, dtypes=stored)
        turned = still.turned(num_turned)
        assert kernel_error(turned, config=config) < 1e-6
        assert relative_error(turned.solve()[1], still.solve()[1]) > 100 * 1e-6


@needs_interpreter
@pytest.mark.parametrize("size", [1, 17, 5000])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_written_where_they_belong(slot_dtype: torch.dtype, size: int) -> None:
    assert WriteVariant(torch.device("cpu"), F32, F32, slot_dtype, size).measure() == 0


def test_rows_by_hand() -> None:
    source, target = torch.arange(6.0).view(3, 2, 1), torch.full((3, 2, 1), -1.0)
    write_rows(source, torch.tensor([2, 0]), target, torch.tensor([1, -1]))
    assert target.flatten().tolist() == [-1, -1, 4, 5, -1, -1]
    for wrong in ((source[:, :1], target), (source.mT, target), (source.mT.expand(3, 1, 2), target)):
        with pytest.raises(ChainsError):
            write_rows(wrong[0], torch.tensor([0]), wrong[1], torch.tensor([0]))
    with pytest.raises(ChainsError, match="as many"):
        write_rows(source, torch.tensor([0]), target, torch.tensor([0, 1]))


@needs_interpreter
def test_kernel_starts_from_rounded_states() -> None:
    problem = Problem.random("dense", 16, 16, dtypes=(BF16,), num_heads=1)
    assert kernel_error(replace(problem, initial=problem.initial.bfloat16())) < 1e-6


@needs_interpreter
def test_kernel_of_a_large_odd_size() -> None:
    assert kernel_error(Problem.random("dense", 96, 40, lengths=(2,), num_heads=1)) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_fold_is_the_product(kind: Kind, backend: Backend) -> None:
    check_fold(kind, 12, 20, backend, "cpu")


@needs_interpreter
def test_a_zero_transition_shuts_out_nan() -> None:
    assert_shut_out("triton")


@needs_interpreter
def test_the_self_check_measures_the_kernel() -> None:
    variant = Variant(torch.device("cpu"), "dense", 20, 12, (F32, F32), (F32, F32), "ieee", None)
    assert measure(variant) < 1e-6
    assert measure(variant._replace(state_dtypes=())) < 1e-6


# -- the reference, and what the tests above would see -------------------------------------------------------------


def test_reference_by_hand() -> None:
    chains = Chains.of([0, 2, 2], [1, 0], [0, 1], [1, ZERO], out_index=[NOT_WANTED, 0])
    transitions, end_states = torch.tensor([[2.0], [3.0]]), torch.tensor([10.0, 100.0]).view(2, 1, 1, 1)
    initial = torch.tensor([0.0, 5.0]).view(2, 1, 1, 1)
    before, final = compose(chains, [transitions], [end_states], initial)
    assert before.flatten().tolist() == [3 * 5 + 10]
    assert final.flatten().tolist() == [2 * 25 + 100, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_reference_matches_plain_products(kind: Kind) -> None:
    problem = Problem.random(kind, 4, 3, lengths=(6,), dtypes=(F32,), num_heads=1, seed=3)
    _, final = problem.solve()
    state = problem.initial[problem.chains.initial_index[0]].double()
    assert problem.chains.initial_index[0] >= 0, "the seed should start this chain from a slot"
    for _, transition, end_state, _ in problem.chains.elements.tolist():
        eye = torch.eye(4, dtype=torch.float64)
        matrix = {-1: 0 * eye, -2: eye}.get(transition)
        if matrix is None:
            stored = problem.transitions[0][transition, 0].double()
            matrix = stored if kind == "dense" else stored * eye
        state = matrix @ state + problem.end_states[0][end_state].double()
    torch.testing.assert_close(final[0], state, rtol=1e-12, atol=1e-12)


def test_rotation_by_hand() -> None:
    """A rotation of every pair of channels, before the next map is applied; what stands still is not rotated."""
    problem = Problem.random("head", 6, 3, lengths=(5,), dtypes=(F32,), num_heads=2, seed=3).turned(2, seed=2)
    assert problem.turns is not None and problem.chains.initial_index[0] >= 0
    rows, cos, sin = problem.turns
    assert STILL in rows.tolist() and max(rows.tolist()) >= 0, "the seed should turn some elements"
    state = problem.initial[problem.chains.initial_index[0]].double()
    for number, (_, transition, end_state, _) in enumerate(problem.chains.elements.tolist()):
        added = problem.end_states[0][end_state].double()
        if rows[number] != STILL:
            for pair in range(2):
                c, s = float(cos[rows[number], pair]), float(sin[rows[number], pair])
                one, other = added[:, pair].clone(), added[:, pair + 2].clone()
                added[:, pair], added[:, pair + 2] = c * one - s * other, s * one + c * other
        factor = {ZERO: 0.0, IDENTITY: 1.0}.get(transition)
        scale = problem.transitions[0][transition].double()[:, None, None] if factor is None else factor
        state = scale * state + added
    torch.testing.assert_close(problem.solve()[1][0], state, rtol=1e-12, atol=1e-12)


def test_only_one_number_a_head_is_rotated_beside() -> None:
    for kind in KINDS[1:]:
        problem = Problem.random(kind, 8, 3).turned(2)
        with pytest.raises(ChainsError, match="one number a head"):
            compose(*problem.arguments, turns=problem.turns)  # type: ignore[arg-type]
    problem = Problem.random("head", 8, 3).turned(2)
    assert problem.turns is not None
    for wrong in (
        {"rows": problem.turns.rows[1:]},
        {"cos": problem.turns.cos[:, :1]},
        {"rows": problem.turns.rows.long()},
    ):
        with pytest.raises(ChainsError):
            compose(*problem.arguments, turns=problem.turns._replace(**wrong))  # type: ignore[arg-type]


def test_reference_runs_in_float64() -> None:
    problem = Problem.random("dense", 4, 3, dtypes=(torch.float64,))
    _, final = compose(problem.chains, problem.transitions, problem.end_states, problem.initial.double())
    assert final.dtype == torch.float64 and relative_error(final, problem.solve()[1]) < 1e-14


def test_gradients_pass_through_the_reference() -> None:
    problem = Problem.random("dense", 4, 3, dtypes=(F32,), lengths=(4,))
    transition = problem.transitions[0].clone().requires_grad_()
    _, final = compose(problem.chains, [transition], problem.end_states, problem.initial)
    final.sum().backward()
    assert transition.grad is not None and transition.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_fold_by_reference(kind: Kind) -> None:
    check_fold(kind, 6, 5, "reference", "cpu")


def test_a_zero_transition_shuts_out_nan_in_the_reference() -> None:
    assert_shut_out("reference")


def test_errors_show() -> None:
    """An error that leaves one element out, rounds to TF32 or writes one row too much is far over what is allowed."""
    problem = Problem.random("dense", 32, 32, dtypes=(F32,))
    exact = problem.solve()

    def error(changed: Problem) -> float:
        return max(map(relative_error, changed.solve(), exact))

    elements = problem.chains.elements.clone()
    used = int((elements[:, 1] >= 0).nonzero()[-1])
    elements[used, 1] = ZERO
    assert error(replace(problem, chains=replace(problem.chains, elements=elements))) > 100 * TOLERANCE
    rounded = (problem.transitions[0].view(torch.int32) & ~0x1FFF).view(F32)
    assert error(replace(problem, transitions=(rounded,))) > 10 * TOLERANCE
    before, final = (tensor.clone() for tensor in exact)
    before[-1] = 0
    assert relative_error(before, exact[0]) == math.inf
    final[0, 0, 0, 0] = math.nan
    assert relative_error(final, exact[1]) == math.inf
