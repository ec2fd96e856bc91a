"""Lift, read and step of decayed attention on a GPU: every layout, precision and size, and recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hypic_kernels.decay import Precision, lift, read, reference, step
from hypic_kernels.decay.check import Kind, LiftVariant, ReadVariant, StepVariant
from hypic_kernels.decay.layout import CHUNK_SIZES, lift_candidates, read_candidates, step_candidates
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.decay.rule import TOLERANCE
from hypic_kernels.trust import relative_error
from tests.kernels.decay.oracle import kind, prepared

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

HEAD_DIMS = [(64, 64), (96, 96), (128, 64), (192, 192), (24, 17)]
DTYPES: list[tuple[torch.dtype, Precision]] = [
    (F32, "ieee"), (F32, "tf32x3"), (F16, "tf32x3"), (BF16, "tf32x3"), (BF16, "bf16"),
]  # fmt: skip


def check_variants(problem: Kind, size: int, precision: Precision, num_layouts: int | None) -> None:
    """Of the first layouts, or of all."""
    dims = (problem.key_dim, problem.value_dim)
    lifts = [LiftVariant(problem, size, precision, each) for each in lift_candidates(size, *dims)[:num_layouts]]
    reads = [ReadVariant(problem, F32, size, precision, each) for each in read_candidates(size, *dims)[:num_layouts]]
    variants: list[LiftVariant | ReadVariant] = [*lifts, *reads]
    for variant in variants:
        assert variant.measure() <= variant.tolerance, variant


def on_gpu(dtype: torch.dtype, head_dims: tuple[int, int], **features: Any) -> Kind:
    return kind(dtype, *head_dims, **features)._replace(device=torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_every_layout_on_a_gpu(size: int) -> None:
    problem = on_gpu(BF16, (128, 128), num_turned=32)
    check_variants(problem, size, "bf16x3", None)
    reads = ReadVariant(problem, BF16, size, "bf16x3", read_candidates(size, 128, 128)[0])
    assert reads.measure() <= reads.tolerance
    for config in step_candidates(128, 128):
        steps = StepVariant(problem, F32, F32, config)
        assert steps.measure() <= steps.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), DTYPES, ids=str)
def test_every_precision_on_a_gpu(dtype: torch.dtype, precision: Precision) -> None:
    check_variants(on_gpu(dtype, (128, 128), num_turned=32), 16, precision, 1)


@pytest.mark.gpu
@prepared
def test_every_preparation_on_a_gpu(features: dict[str, Any]) -> None:
    problem = on_gpu(BF16, (64, 64), **features)
    check_variants(problem, 16, "bf16x3", 1)
    steps = StepVariant(problem, F32, BF16, step_candidates(64, 64)[0])
    assert steps.measure() <= steps.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_size_on_a_gpu(head_dims: tuple[int, int]) -> None:
    problem = on_gpu(BF16, head_dims, num_turned=head_dims[0] // 4)
    for size in (16, 64):
        check_variants(problem, size, "bf16x3", 1)
    steps = StepVariant(problem, F32, F32, step_candidates(*head_dims)[0])
    assert steps.measure() <= steps.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_many_programs_give_the_same_every_time(size: int) -> None:
    """Enough of them to fill the chip several times: a race would move the result."""
    shape = Shape(128, 128, 16, 16, size, lengths=(2000, 8, 8, 1), num_turned=32)
    p = Problem.random(shape, dtype=BF16, device="cuda")
    first, again = (lift(p.k, p.v, p.g, p.chunks, rule=p.rule, out=p.poisoned(), backend="triton") for _ in range(2))
    assert max(map(relative_error, first, p.lifted())) < TOLERANCE["bf16x3"]
    assert all(torch.equal(one[p.is_used], other[p.is_used]) for one, other in zip(first, again, strict=True))


SMALL = [(8, 8), (12, 8), (16, 16), (32, 16)]


@pytest.mark.parametrize("head_dims", SMALL, ids=str)
def test_small_heads_have_wide_tiles_and_four_warps(head_dims: tuple[int, int]) -> None:
    """Tiles of 64 x 16 are compiled to reads out of bounds (Triton 3.6, sm_90)."""
    for candidates in (lift_candidates, read_candidates):
        assert {(config.block_v, config.num_warps) for config in candidates(64, *head_dims)} == {(32, 4)}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), DTYPES, ids=str)
@pytest.mark.parametrize("head_dims", SMALL, ids=str)
def test_many_programs_of_small_heads(head_dims: tuple[int, int], dtype: torch.dtype, precision: Precision) -> None:
    shape = Shape(*head_dims, 2, 2, 64, lengths=(8, 1, 131) * 40, silu=True, has_norm=False)
    p = Problem.random(shape, dtype=dtype, device="cuda")
    wide = p.wide()
    exact = reference.read(*wide.tokens, wide.states, p.chunks, wide.rule)
    for config in read_candidates(64, *head_dims):
        out = torch.full_like(p.v, torch.nan, dtype=F32)
        read(*p.tokens, p.states, p.chunks, out, rule=p.rule, precision=precision, backend="triton", config=config)
        assert relative_error(out, exact) < TOLERANCE[precision]


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chunks() -> None:
    """Captured on one cut of the tokens and replayed on another, with other states and slots."""
    shapes = [Shape(64, 64, 2, 4, 16, lengths, padding, num_turned=8)
              for lengths, padding in (((30, 2), 2), ((3, 17, 12), 1))]  # fmt: skip
    p, other = (Problem.random(shape, dtype=BF16, device="cuda", seed=n) for n, shape in enumerate(shapes))
    assert p.chunks.shape == other.chunks.shape
    maps, out, pool = p.poisoned(), torch.empty_like(p.v, dtype=F32), p.pool()
    reads, writes = (tensor.clone() for tensor in p.slots())

    def run() -> None:
        lift(p.k, p.v, p.g, p.chunks, rule=p.rule, out=maps)
        read(*p.tokens, p.states, p.chunks, out, rule=p.rule)
        step(*p.tokens, pool, reads, writes, rule=p.rule)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    p.chunks.copy_(other.chunks)
    p.states.copy_(other.states)
    pool.copy_(p.pool())
    graph.replay()
    assert max(map(relative_error, (t[p.is_used] for t in maps), (t[p.is_used] for t in p.lifted()))) < 1e-4
    again = torch.empty_like(out)
    read(*p.tokens, p.states, p.chunks, again, rule=p.rule, backend="reference")
    assert relative_error(out, again.double()) < 1e-4
