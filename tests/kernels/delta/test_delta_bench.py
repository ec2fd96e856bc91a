"""The bench measures what it says: its workloads and its errors, on a small size and a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import pytest

from hypic_kernels import available, interpreted
from hypic_kernels.delta import bench
from hypic_kernels.delta.bench import Bench, Case, _ReadWork, lifted
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.trust import relative_error

SMALL = Bench(num_k_heads=1, num_v_heads=2, key_dim=16, value_dim=16, device="cpu")
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="needs Triton 3.7 or newer with TRITON_INTERPRET=1",
)


def test_the_warm_request_is_as_described() -> None:
    problem = SMALL.problem(bench.WARM, 16, 0)
    assert len(problem.q) == 256 and problem.chunks.shape == (24, 16)
    assert len(SMALL.problem(bench.LONG, 64, 0).chunks) == 258


def test_lifting_in_parts_is_lifting() -> None:
    problem = SMALL.problem((1040, 5), 16, 0)
    assert len(problem.chunks) > 64
    assert max(map(relative_error, lifted(problem), problem.lifted())) < 1e-6


def test_bytes_and_exactness_of_reading() -> None:
    work = _ReadWork.of(SMALL.problem((20,), 16, 0))
    assert work.num_bytes == 4 * 2 * 2 * (16 * 16 + 16 * 16 + 16 * 16) + 2 * 2 * 20 * 2 * 16
    assert work.exact().shape == (20, 2, 16)


def test_a_wrong_result_is_seen_and_not_timed() -> None:
    pytest.importorskip("triton")
    result = SMALL.timed([lambda: None], lambda: 0.5, 1e-5)
    assert "time_s" not in result and "wrong" in result["fault"]
    row = bench.row("lift", Case("warm", (8,), 16, 1), "ieee", bench.lift_candidates(16, 16, 16)[0], 10, result)
    assert "bytes_per_s" not in row and row["num_tokens"] == 8


@needs_interpreter
def test_both_ways_through_a_warm_layer_agree() -> None:
    from hypic_kernels.delta import bench_layer

    # In float32: products of bfloat16 are not the interpreter's.
    shape = Shape(16, 16, 1, 2, 16, lengths=(3, 3, 20), padding=0)
    problem = Problem.random(shape)
    results: list[float] = []

    def only_run(runs: Sequence[Callable[[], object]], error: Callable[[], float], limit: float) -> dict[str, Any]:
        runs[0]()
        results.append(error())
        return {}

    rows = list(bench_layer.rows([problem], 2, only_run, ["ieee"]))
    assert [row["name"] for row in rows[:2]] == ["dense", "factored"] and len(rows) == len(results) > 2
    assert max(results) < 1e-5
    layer = bench_layer.Layer.of(problem, 2)
    assert layer.chains(is_dense=True).elements[:, 3].tolist() == [0, -1, 1, -1, 2, 3]
    other = Problem.random(shape, seed=1)
    assert relative_error(bench_layer.Layer.of(other, 2).exact(), layer.exact()) > 1e-2
