"""The kernel is its reference's twin on a GPU: every layout, storage type and size, and recorded."""

from __future__ import annotations

import math

import pytest
import torch

from hypic_kernels.compose import Config, compose
from hypic_kernels.compose.check import WriteVariant
from hypic_kernels.compose.layout import KINDS, Kind, Precision, candidates
from hypic_kernels.compose.problem import Problem, relative_error
from tests.kernels.compose_checks import BATCHES, SHAPES, STORED, assert_shut_out, check_fold, kernel_error

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.gpu
def test_rows_are_written_on_a_gpu() -> None:
    for target_dtype, size in ((F32, 16 * 128 * 128), (BF16, 24 * 17)):
        assert WriteVariant(torch.device("cuda"), F32, target_dtype, torch.int64, size).measure() == 0


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
