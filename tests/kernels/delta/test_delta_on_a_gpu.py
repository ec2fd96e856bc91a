"""Lift, read and step on a GPU: every layout, precision and size, and recorded."""

from __future__ import annotations

import math

import pytest
import torch

from hypic_kernels.delta import LiftConfig, Precision, lift, read, step
from hypic_kernels.delta.layout import CHUNK_SIZES, lift_candidates, read_candidates, step_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import TOLERANCE
from hypic_kernels.trust import relative_error
from tests.kernels.delta.oracle import HEAD_DIMS, Layout, check_read, check_step

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

PRECISIONS: list[tuple[torch.dtype, Precision]] = [
    (F32, "ieee"), (F32, "tf32x3"), (F16, "tf32x3"), (BF16, "tf32x3"), (BF16, "bf16x3"), (BF16, "bf16"),
]  # fmt: skip


def lift_error(p: Problem, precision: Precision, config: LiftConfig | None = None) -> float:
    maps = lift(
        *p.tokens, p.chunks, rule=p.rule, out=p.poisoned(), precision=precision, backend="triton", config=config
    )
    return max(map(relative_error, maps, p.lifted()))


def limit_of(precision: Precision) -> float:
    return TOLERANCE["tf32x3"] if precision == "bf16x3" else TOLERANCE[precision]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS, ids=str)
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_every_layout_of_lift_on_a_gpu(size: int, dtype: torch.dtype, precision: Precision) -> None:
    for config in lift_candidates(size, 128, 128):
        p = Problem.random(Shape(128, 128, 2, 4, size, (8, 1, 3 * size + 5)), dtype=dtype, device="cuda")
        assert lift_error(p, precision, config) < limit_of(precision), config


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_lift_of_every_size_on_a_gpu(size: int, head_dims: tuple[int, int]) -> None:
    for dtype in (F32, BF16):
        for is_raw in (True, False):
            p = Problem.random(Shape(*head_dims, 2, 4, size), dtype=dtype, is_raw=is_raw, device="cuda")
            assert lift_error(p, "bf16x3" if dtype == BF16 else "tf32x3") < TOLERANCE["tf32x3"]


def tried(layouts: list[Layout], head_dims: tuple[int, int]) -> list[Layout]:
    """All layouts for the heads of most models, else the one that is taken; each takes a second or more to compile."""
    return layouts if head_dims == (128, 128) else layouts[:1]


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_layout_of_every_size_on_a_gpu(head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tried", lambda layouts, head_dims: layouts)
    for precision in ("ieee", "tf32x3", "bf16x3", "bf16"):
        test_read_on_a_gpu(head_dims, precision)
    for dtype in (F32, BF16, F16):
        test_step_on_a_gpu(head_dims, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "bf16x3", "bf16"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_read_on_a_gpu(head_dims: tuple[int, int], precision: Precision) -> None:
    for size in CHUNK_SIZES:
        for has_norm in (True, False):
            for config in tried(read_candidates(size, *head_dims, has_norm), head_dims):
                p = Problem.random(Shape(*head_dims, 2, 4, size), device="cuda")
                check_read(p, TOLERANCE[precision], has_norm=has_norm, precision=precision, config=config)
    rounded = Problem.random(Shape(*head_dims, 2, 4), dtype=BF16, device="cuda")
    check_read(rounded, TOLERANCE[precision] + 2**-8, has_norm=True, out_dtype=BF16, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_step_on_a_gpu(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    for config in tried(step_candidates(*head_dims), head_dims):
        for has_norm in (True, False):
            p = Problem.random(Shape(*head_dims, 2, 4, lengths=(9,)), dtype=dtype, device="cuda")
            check_step(p, 3e-6, has_norm, "triton", config, rounds=0.0 if dtype == F32 else 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_many_programs_give_the_same_every_time(size: int) -> None:
    """Enough of them to fill the chip several times: a race would move the result."""
    p = Problem.random(Shape(128, 128, 16, 32, size, lengths=(2000, 8, 8, 1)), dtype=BF16, device="cuda")
    assert lift_error(p, "bf16x3") < TOLERANCE["tf32x3"]
    first, again = (lift(*p.tokens, p.chunks, rule=p.rule, out=p.poisoned(), backend="triton") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chunks() -> None:
    """Captured on one cut of the tokens and replayed on another, with other states and slots."""
    p = Problem.random(Shape(64, 64, 2, 4, 16, (30, 2), padding=2), dtype=BF16, device="cuda")
    other = Problem.random(Shape(64, 64, 2, 4, 16, (3, 17, 12), padding=1), dtype=BF16, device="cuda", seed=1)
    assert p.chunks.shape == other.chunks.shape
    maps, out, pool = p.poisoned(), torch.empty_like(p.v), p.pool()
    places = torch.zeros(len(p.chunks), dtype=torch.int32, device="cuda")
    reads, writes = (tensor.clone() for tensor in p.slots())

    def run() -> None:
        lift(*p.tokens, p.chunks, rule=p.rule, out=maps)
        read(maps.query, maps.offset, p.states, p.chunks, out, places=places, norm=p.norm)
        step(*p.tokens, pool, reads, writes, rule=p.rule)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    p.chunks.copy_(other.chunks)
    p.v.copy_(other.v)
    places.copy_(torch.arange(len(places), dtype=torch.int32) % 3)
    for tensor in (*maps, out):
        tensor.fill_(math.nan)
    reads.fill_(2)
    pool.copy_(p.pool())
    graph.replay()
    torch.cuda.synchronize()
    assert max(map(relative_error, maps, p.lifted())) < TOLERANCE["tf32x3"]
    exact = torch.empty_like(p.v, dtype=F64)
    _, _, query, offset = (tensor.contiguous() for tensor in p.lifted())
    read(query, offset, p.states.double(), p.chunks, exact, places=places, norm=p.wide().norm, backend="reference")
    assert relative_error(out, exact) < 2**-8
    after = p.pool().double()
    step(*p.wide().tokens, after, reads, writes, rule=p.rule, backend="reference")
    assert relative_error(pool, after) < 3e-6
