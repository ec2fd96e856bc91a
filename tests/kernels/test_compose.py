"""The kernel is its reference's twin: in Triton's interpreter here, and the same on a GPU, in every layout."""

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
    fold,
    write_rows,
)
from hypic_kernels.compose.check import TOLERANCE, Variant, WriteVariant, measure
from hypic_kernels.compose.layout import KINDS, Kind, Precision, candidates
from hypic_kernels.compose.problem import Problem, relative_error

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STORED = [(F32,), (F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32), (F16,)]
SHAPES = [(128, 128), (96, 192), (64, 64), (96, 40), (24, 17), (16, 16), (7, 3), (1, 1)]
BATCHES = [(), (0,), (0, 0, 0), (1,), (17,), (3, 0, 5, 1), (0, 2, 9, 0)]

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)


def kernel_error(problem: Problem, precision: Precision = "ieee", config: Config | None = None) -> float:
    """The kernel's error against float64, after a look that it left its inputs alone."""
    from hypic_kernels.compose import triton as kernel

    inputs = (*problem.transitions, *problem.end_states, problem.initial, problem.chains.elements)
    copies = [tensor.clone() for tensor in inputs]
    before, final = problem.outputs()
    kernel.compose(*problem.arguments, before, final, precision, config, problem.turns)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))
    return max(map(relative_error, (before, final), problem.solve()))


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


@pytest.mark.gpu
def test_rows_are_written_on_a_gpu() -> None:
    for target_dtype, size in ((F32, 16 * 128 * 128), (BF16, 24 * 17)):
        assert WriteVariant(torch.device("cuda"), F32, target_dtype, torch.int64, size).measure() == 0


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


# -- shared with the tests on a GPU --------------------------------------------------------------------------------


def check_fold(kind: Kind, key_dim: int, value_dim: int, backend: Backend, device: str) -> None:
    """Applying a fold equals walking its elements."""
    drawn = Problem.random(kind, key_dim, value_dim, device=device)
    elements = drawn.chains.elements.clone()
    elements[:, 3] = NOT_WANTED
    chains = replace(drawn.chains, elements=elements, num_outputs=0)
    transition, end_state = fold(chains, drawn.transitions, drawn.end_states, backend=backend)
    assert transition.shape == (chains.num_chains, *drawn.transitions[0].shape[1:])
    state = torch.where((chains.initial_index >= 0).view(-1, 1, 1, 1), drawn.initial[chains.initial_index.clamp(0)], 0)
    missing = 0 if kind == "dense" else state.ndim - transition.ndim
    acted = transition @ state if kind == "dense" else transition[(...,) + (None,) * missing] * state
    assert relative_error(acted + end_state, drawn.solve()[1]) < 1e-6


def assert_shut_out(backend: Backend, device: str = "cpu") -> None:
    chains = Chains.of([0, 2], [0, ZERO], [0, 1], [ZERO], device=device)
    transitions = torch.eye(16, device=device).view(1, 1, 16, 16)
    end_states = torch.ones(2, 1, 16, 16, device=device)
    end_states[0] = math.nan
    before, final = compose(chains, [transitions], [end_states], torch.zeros_like(transitions), backend=backend)
    assert bool(before[1].isnan().all()) and torch.equal(final, torch.ones_like(final))


# -- on a GPU ------------------------------------------------------------------------------------------------------


def limit(precision: Precision) -> float:
    return 1e-6 if precision == "ieee" else 3e-6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "precision", "config"),
    [(kind, "ieee", config) for kind in KINDS[:2] for config in candidates(kind, 128, 128, "ieee")]
    + [("dense", p, config) for p in ("ieee", "tf32x3") for config in candidates("dense", 128, 128, p)],  # type: ignore[arg-type]
    ids=str,
)
def test_every_layout_on_a_gpu(kind: Kind, precision: Precision, config: Config) -> None:
    problem = Problem.random(kind, 128, 128, lengths=(7, 0, 16, 1), num_heads=3, device="cuda")
    assert kernel_error(problem, precision, config) < limit(precision)
    if kind == "head":
        assert kernel_error(problem.turned(32), precision, config) < limit(precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_every_storage_type_on_a_gpu(stored: tuple[torch.dtype, ...], precision: Precision) -> None:
    for kind in KINDS:
        assert kernel_error(Problem.random(kind, 128, 128, dtypes=stored, device="cuda"), precision) < limit(precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_size_on_a_gpu(shape: tuple[int, int], precision: Precision) -> None:
    for kind in KINDS:
        assert kernel_error(Problem.random(kind, *shape, device="cuda"), precision) < limit(precision)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_ragged_chains_on_a_gpu(lengths: tuple[int, ...]) -> None:
    assert kernel_error(Problem.random("dense", 64, 64, lengths=lengths, device="cuda")) < limit("ieee")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_many_programs_give_the_same_every_time(precision: Precision) -> None:
    """Enough of them to fill the chip several times: a race would move the result."""
    from hypic_kernels.compose import triton as kernel

    problem = Problem.random("dense", 128, 128, lengths=(16, 3, 0, 40, 16), num_heads=32, device="cuda")
    assert kernel_error(problem, precision) < limit(precision)
    first, again = problem.outputs(), problem.outputs()
    for before, final in (first, again):
        kernel.compose(*problem.arguments, before, final, precision)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_fold_and_automatic_choice_on_a_gpu(kind: Kind) -> None:
    check_fold(kind, 128, 96, "triton", "cuda")
    check_fold(kind, 128, 96, "auto", "cuda")


@pytest.mark.gpu
def test_a_zero_transition_shuts_out_nan_on_a_gpu() -> None:
    assert_shut_out("triton", "cuda")


@pytest.mark.gpu
def test_compose_is_captured_in_a_graph() -> None:
    problem = Problem.random("dense", 64, 64, device="cuda")
    before, final = problem.outputs()
    assert problem.end_states
    chains, transitions, end_states, initial = problem.chains, problem.transitions, problem.end_states, problem.initial
    compose(chains, transitions, end_states, initial, before=before, final=final)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compose(chains, transitions, end_states, initial, before=before, final=final)
    initial.mul_(2)
    before.fill_(math.nan)
    final.fill_(math.nan)
    graph.replay()
    assert max(map(relative_error, (before, final), problem.solve())) < limit("ieee")
