"""The bench measures what it says: its workloads and its errors, on a small size and a CPU."""

from __future__ import annotations

import pytest

from hypic_kernels import available, interpreted
from hypic_kernels.delta import ScanConfig, bench
from hypic_kernels.delta.bench import Bench, Case, _ReadWork, lifted
from hypic_kernels.delta.layout import lift_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.trust import relative_error

SMALL = Bench(num_k_heads=1, num_v_heads=2, key_dim=16, value_dim=16, device="cpu")


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
    row = bench.row("lift", Case("warm", (8,), 16, 1), "ieee", lift_candidates(16, 16, 16)[0], 10, result)
    assert "bytes_per_s" not in row and row["num_tokens"] == 8


@pytest.mark.skipif(not (available() and interpreted()), reason="runs kernels on CPU tensors")
def test_both_ways_through_a_layer_are_the_same() -> None:
    from hypic_kernels.delta.bench_layer import Layer, dense, scanned

    problem = Problem.random(Shape(16, 16, 1, 2, 16, (8, 8, 16), padding=0))
    layer = Layer.of(problem, 2)
    exact = layer.exact()
    for way in (dense, scanned("tf32x3", ScanConfig(16, 4))):
        layer.poison()
        for run in way(layer).values():
            run()
        assert max(layer.errors(exact).values()) < 1e-6
    layer.final.mul_(1.001)
    assert layer.errors(exact)["state_error"] > 1e-4
