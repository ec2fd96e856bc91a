"""Rows that carry their state: the reference against the loop over tokens, what is refused, and fla on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hypic_kernels.delta import DeltaError, GatedNorm, Rule, chunked, runs_here
from hypic_kernels.delta.check import RunVariant
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import TOLERANCE
from hypic_kernels.rows import Rows, row_arrays
from hypic_kernels.trust import relative_error
from tests.kernels.delta.oracle import advance, starts, walked
from tests.kernels.delta.running import initial_of, problem_of, ran

F64 = torch.float64
LENGTHS = (70, 64, 1, 130)


def test_chunks_are_counted_row_by_row() -> None:
    made = row_arrays(LENGTHS)
    assert made.cu_seqlens.tolist() == [0, 70, 134, 135, 265] and made.chunk_offsets.tolist() == [0, 2, 3, 4, 7]
    assert made.chunk_indices.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
    rows = Rows.of(LENGTHS, 2, marks={3: 0})
    assert (rows.num_rows, rows.num_folds, rows.num_marks) == (4, 2, 1)
    assert rows.folds.tolist() == [[0, 2], [2, 3]] and rows.marks.tolist() == [-1, -1, -1, 0, -1, -1, -1]


@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "given"])
def test_the_reference_equals_tokens_one_after_the_other(is_raw: bool) -> None:
    p = problem_of(LENGTHS, is_raw=is_raw)
    out, final, transitions = ran(p.wide(), Rows.of(LENGTHS, 2), initial_of(p, 4).double())
    outputs, finals = walked(p, LENGTHS)
    assert relative_error(out, outputs) < 1e-12
    for head, ends in enumerate(finals):
        assert all(relative_error(final[row, head], end) < 1e-12 for row, end in enumerate(ends))
    assert transitions.shape == (2, 4, 24, 24)
    # A row's transition is what the loop does to the difference of two states.
    for head in range(4):
        one, other = starts(p, head, 0), torch.zeros(24, 17, dtype=F64)
        for token in range(70):
            one, other = advance(p, token, head, one)[1], advance(p, token, head, other)[1]
        assert relative_error(transitions[0, head] @ starts(p, head, 0), one - other) < 1e-8


def test_rows_name_tokens_in_any_order_and_others_are_left() -> None:
    p, lengths = problem_of((200,)).wide(), (70, 64)
    tokens = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:134].to(torch.int32)
    rows, initial = replace(Rows.of(lengths, 1), tokens=tokens), initial_of(p, 2)
    out, final, transitions = ran(p, rows, initial, p.norm)
    picked = replace(p, **{name: getattr(p, name)[tokens.long()] for name in ("q", "k", "v", "g", "beta")})
    norm = GatedNorm(p.norm.z[tokens.long()], p.norm.weight, p.norm.eps)
    expected = ran(picked, Rows.of(lengths, 1), initial, norm)
    found = (out[tokens.long()], final, transitions)
    assert all(relative_error(one, other) < 1e-12 for one, other in zip(found, expected, strict=True))
    assert int(out.isnan().all(-1).all(-1).sum()) == 66


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_only_bfloat16_on_a_gpu_is_for_fla() -> None:
    p, rows = problem_of(LENGTHS), Rows.of(LENGTHS)
    with pytest.raises(DeltaError, match="bfloat16 on a CUDA device"):
        ran(p, rows, initial_of(p, 4), backend="fla")
    assert not runs_here(2, 4, 24, 17, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"folds": torch.zeros(2, 3, dtype=torch.int32)}, "rows.folds"),
        ({"num_marks": 8}, "8 states before chunks are wanted; there are 7 chunks"),
        ({"tokens": torch.zeros(265)}, "rows.tokens is torch.float32"),
        ({"chunk_offsets": torch.zeros(3, dtype=torch.int32)}, "rows.chunk_offsets"),
        ({"cu_seqlens": torch.zeros(4, dtype=torch.int32)}, "rows.chunk_offsets"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rows_that_do_not_fit_are_refused(wrong: dict[str, Any], words: str) -> None:
    p = problem_of(LENGTHS)
    with pytest.raises(DeltaError, match=words):
        ran(p, replace(Rows.of(LENGTHS), **wrong), initial_of(p, 4))


def test_states_that_do_not_fit_are_refused() -> None:
    p = problem_of(LENGTHS)
    with pytest.raises(DeltaError, match="initial has shape"):
        ran(p, Rows.of(LENGTHS), initial_of(p, 3))
    with pytest.raises(DeltaError, match="initial must be contiguous"):
        ran(p, Rows.of(LENGTHS), initial_of(p, 8)[::2])


# -- on a GPU ----------------------------------------------------------------------------------------------------------

GPU_SHAPES = [(128, 128, 4, 8), (64, 64, 2, 2), (96, 192, 2, 4), (192, 192, 2, 2), (256, 256, 1, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_fla_gives_what_the_reference_gives(shape: tuple[int, int, int, int]) -> None:
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    lengths = (1, 700, 64, 129)
    p = Problem.random(Shape(*shape, 64, lengths, 0), dtype=torch.bfloat16, device="cuda")
    rows, initial, wide = Rows.of(lengths, 2, "cuda"), p.states[:4].contiguous(), p.wide()
    found = ran(p, rows, initial, p.norm, backend="fla")
    expected = ran(wide, rows, initial.double(), wide.norm)
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE["bf16"]
    # The control: another order of the rows' states must be far off.
    shifted = ran(p, rows, initial.roll(1, 0).contiguous(), p.norm, backend="fla")
    assert relative_error(shifted[0], expected[0]) > 10 * TOLERANCE["bf16"]


@pytest.mark.gpu
def test_fla_is_recorded_and_replayed_with_other_rows() -> None:
    """Nothing in a call asks the device."""
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    lengths = (300, 200)
    p = Problem.random(Shape(64, 64, 2, 4, 64, lengths, 0), dtype=torch.bfloat16, device="cuda")
    rows, initial = Rows.of(lengths, 1, "cuda"), p.states[:2].contiguous()
    ran(p, rows, initial, p.norm, backend="fla")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ran(p, rows, initial, p.norm, backend="fla")
    rows.tokens.copy_(rows.tokens.flip(0))
    graph.replay()
    for one, other in zip(recorded, ran(p, rows, initial, p.norm, backend="fla"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_the_self_check_passes_where_fla_is_right() -> None:
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    variant = RunVariant(torch.device("cuda", 0), torch.bfloat16, 2, 4, 64, 64, True, True)
    assert variant.measure() < variant.tolerance


def test_a_rule_without_norm_is_run_too() -> None:
    p = problem_of((70,), is_raw=False)
    assert p.rule == Rule(scale=0.5) and not p.rule.normalise
    out, *_ = ran(p.wide(), Rows.of((70,)), initial_of(p, 1).double())
    assert relative_error(out, walked(p, (70,))[0]) < 1e-12
