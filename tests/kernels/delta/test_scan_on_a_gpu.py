"""The scan on a GPU: every layout and type, the norm, and recorded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from hypic_kernels.delta import ScanConfig, scan
from hypic_kernels.delta.check import NormVariant, ScanVariant
from hypic_kernels.delta.layout import SCAN_CHUNK_SIZES, scan_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import SCAN_PRECISIONS, SCAN_TOLERANCE, ScanPrecision
from hypic_kernels.delta.walk import Walk
from hypic_kernels.trust import relative_error

F32, BF16 = torch.float32, torch.bfloat16

GPU_HEADS = ((64, 64), (96, 192), (128, 128), (24, 17))
STORED_TYPES = list(itertools.product((F32, BF16), ((F32, F32), (BF16, BF16), ())))


def in_every_case(test: Callable[..., None]) -> Callable[..., None]:
    for name, values in (("head_dims", GPU_HEADS), ("precision", SCAN_PRECISIONS), ("size", SCAN_CHUNK_SIZES)):
        test = pytest.mark.parametrize(name, values, ids=str)(test)
    return test


def check_scans(
    size: int, precision: ScanPrecision, head_dims: tuple[int, int], cases: Iterable[tuple[ScanConfig, Any]]
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for config, (dtype, maps) in cases:
        variant = ScanVariant(device, dtype, F32, maps, F32, size, 2, *head_dims, True, precision, config)
        assert variant.measure() < SCAN_TOLERANCE[precision], variant


def rotating(size: int, precision: ScanPrecision, head_dims: tuple[int, int]) -> list[tuple[ScanConfig, Any]]:
    """Every layout with types that differ from case to case, each of which takes seconds to compile; for the heads of
    most models the first layout with all of them."""
    turn = SCAN_CHUNK_SIZES.index(size) + 2 * SCAN_PRECISIONS.index(precision) + GPU_HEADS.index(head_dims)
    layouts = scan_candidates(*head_dims)
    found = [(config, STORED_TYPES[(turn + 2 * n) % len(STORED_TYPES)]) for n, config in enumerate(layouts)]
    return found if head_dims != (128, 128) else [*found[1:], *((layouts[0], types) for types in STORED_TYPES)]


def test_rotating_types_leave_none_out() -> None:
    seen = [(size, types) for size in SCAN_CHUNK_SIZES for precision in SCAN_PRECISIONS for head_dims in GPU_HEADS[:2]
            for _, types in rotating(size, precision, head_dims)]  # fmt: skip
    assert set(seen) == set(itertools.product(SCAN_CHUNK_SIZES, STORED_TYPES))


@pytest.mark.gpu
@in_every_case
def test_every_layout_on_a_gpu(size: int, precision: ScanPrecision, head_dims: tuple[int, int]) -> None:
    check_scans(size, precision, head_dims, rotating(size, precision, head_dims))


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(1800)
@in_every_case
def test_every_layout_and_type_on_a_gpu(size: int, precision: ScanPrecision, head_dims: tuple[int, int]) -> None:
    check_scans(size, precision, head_dims, itertools.product(scan_candidates(*head_dims), STORED_TYPES))


@pytest.mark.gpu
def test_the_norm_on_a_gpu() -> None:
    for dtype in (F32, BF16):
        norm = NormVariant(torch.device("cuda", torch.cuda.current_device()), F32, BF16, dtype, 128)
        assert norm.measure() <= norm.tolerance


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chains() -> None:
    p = Problem.random(Shape(64, 64, 2, 4, 16, (8, 8, 30)), dtype=BF16, device="cuda")
    walk = Walk.random(p)
    out, before, final = walk.outputs(F32, F32)
    given = (*p.tokens, p.chunks, walk.chains, walk.stored, walk.initial, out)

    def run() -> None:
        scan(*given, rule=p.rule, before=before, final=final, final_slots=walk.final_slots)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    walk.chains.elements[:, 1] = walk.chains.elements[:, 1].clamp(max=0)
    walk.chains.initial_index.fill_(3)
    for tensor in (out, before, final):
        tensor.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert max(map(relative_error, (out, before, final), walk.exact(p))) < SCAN_TOLERANCE["tf32x3"]
