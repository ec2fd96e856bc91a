"""The kernel is its reference's twin on a GPU: every layout, type and size, recorded, and on any device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hypic_kernels.attention import Chip, Config, HeadDims, attend, chip_of, default_config, plan_of
from hypic_kernels.attention.check import TOLERANCES
from hypic_kernels.attention.layout import candidates, layouts
from hypic_kernels.attention.plan import ChainQueries
from hypic_kernels.attention.problem import SMALL, Problem, Work
from hypic_kernels.trust import relative_error
from tests.kernels.attention.kernel_checks import WORKS, check_no_leak, check_public_call, check_sharing, kernel_error

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# The interpreter computes both sides of a choice: a division by zero where nothing was seen is not used.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")

LONG = (
    Work.last(700, 130),
    Work(1500, tuple((first, 8) for first in range(0, 1500, 130))),
    Work(0, ()),
    Work.last(1, 1),
    Work.last(129, 2),
)
GPU_HEADS = [
    HeadDims(4, 64, 64, 64),
    HeadDims(4, 96, 96, 96),
    HeadDims(4, 128, 128, 128),
    HeadDims(7, 128, 128, 64),
    HeadDims(2, 192, 192, 64),
    HeadDims(1, 192, 128, 64),
    HeadDims(8, 256, 256, 64),
    HeadDims(4, 256, 256, 256),
    HeadDims(8, 256, 256, 0),
    HeadDims(32, 64, 512, 64, is_latent=True),
    HeadDims(16, 64, 512, 0, is_latent=True),
]


def gpu_problem(dims: HeadDims, dtype: torch.dtype, tile: int, num_lanes: int = 0) -> Problem:
    heads = 1 if dims.is_latent else 2
    return Problem.random(
        dims, LONG, num_key_heads=heads, dtype=dtype, tile=tile, num_lanes=num_lanes, spare=2, device="cuda"
    )


def chip() -> Chip:
    return chip_of(torch.device("cuda"))


def wrong_layouts(dims: HeadDims, dtype: torch.dtype, layouts: list[tuple[int, Config]]) -> dict[object, float]:
    """Errors that are too large, with keys split and whole, turned when they are read and before; what this chip has
    too little memory for is left out."""
    limit, wrong = chip().shared_bytes, dict[object, float]()
    for tile, config in layouts:
        once = config._replace(turns_once=True)
        for num_lanes, layout in ((0, config), (99, config), *(((60, once),) if dims.rotary_dim else ())):
            if layout.shared_bytes(dims, dtype, limit) <= limit:
                error = kernel_error(gpu_problem(dims, dtype, tile, num_lanes), layout)
                if not error < TOLERANCES[dtype]:
                    wrong[tile, layout, num_lanes] = error
    return wrong


def _is_first(config: Config) -> bool:
    """Keys turned before they are asked are tried beside the other way, but where there is no other."""
    return config.hopper or not config.turns_once


CHECKED = [(dims, BF16) for dims in GPU_HEADS] + [(GPU_HEADS[n], t) for n in (2, 6, 9) for t in (F16, F32)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "dtype"), CHECKED, ids=str)
def test_every_chosen_layout_on_a_gpu(dims: HeadDims, dtype: torch.dtype) -> None:
    found = layouts(dims, dtype, chip())
    assert not wrong_layouts(dims, dtype, [(tile, config) for config, tile in found.items() if _is_first(config)])


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("dims", GPU_HEADS, ids=str)
def test_every_layout_on_a_gpu(dims: HeadDims, dtype: torch.dtype) -> None:
    layouts = [(tile, config) for tile, config in candidates(dims, dtype) if not config.turns_once]
    assert not wrong_layouts(dims, dtype, layouts)


@pytest.mark.gpu
@pytest.mark.parametrize("works", [SMALL, *WORKS], ids=str)
def test_any_length_on_a_gpu(works: tuple[Work, ...]) -> None:
    for tile, num_lanes in ((1, 0), (4, 70), (32, 20)):
        problem = Problem.random(
            HeadDims(4, 64, 64, 64), works, dtype=BF16, tile=tile, num_lanes=num_lanes, device="cuda"
        )
        config = default_config(problem.dims, BF16, tile, 227 << 10)
        assert kernel_error(problem, config) < TOLERANCES[BF16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_public_call_sharing_and_leaks_on_a_gpu(dtype: torch.dtype) -> None:
    check_public_call("cuda")
    check_sharing("cuda")
    check_no_leak("cuda", dtype, default_config(HeadDims(2, 64, 64, 64), dtype, 4, 99 << 10))


@pytest.mark.gpu
def test_automatic_choice_on_a_gpu() -> None:
    p = gpu_problem(HeadDims(8, 256, 256, 64), BF16, 16, 4)
    out = attend(*p.arguments[:4], cos=p.cos, sin=p.sin, scale=p.scale, out=p.output())
    assert relative_error(out, p.solve()) < TOLERANCES[BF16]


@pytest.mark.gpu
@pytest.mark.parametrize("num_lanes", [0, 132])
def test_many_programs_give_the_same_every_time(num_lanes: int) -> None:
    """Enough of them to fill the chip: a race would move the result."""
    dims = HeadDims(8, 256, 256, 64)
    work = [Work(9000, tuple((first, 40) for first in range(0, 9000, 400)))]
    problem = Problem.random(dims, work, dtype=BF16, tile=16, num_lanes=num_lanes, device="cuda")
    config = default_config(dims, BF16, 16, 227 << 10)
    first = problem.run(config)
    assert all(torch.equal(first, problem.run(config)) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_lanes", "turns_once"), [(0, False), (90, False), (70, True)])
def test_a_captured_graph_follows_its_plan(num_lanes: int, turns_once: bool) -> None:
    """Other chains, lengths and positions, written over the plan between replays."""
    from hypic_kernels.attention.plan import PlanSizes

    sizes, draw = PlanSizes(2000, 5, 160, 60), torch.Generator().manual_seed(1)
    drawn = Problem.random(
        HeadDims(4, 128, 128, 128), [Work.last(2000, 160)], num_slots=2000, dtype=BF16, device="cuda"
    )

    def planned(*works: Work) -> Problem:
        chains = []
        for work in works:
            slots = torch.randperm(2000, generator=draw)[: work.length].numpy()
            chains.append(ChainQueries(slots, torch.tensor(work.positions, dtype=torch.int64).numpy()))
        plan = plan_of(chains, tile=4, num_lanes=num_lanes, unit=16, sizes=sizes, device="cuda")
        return replace(drawn, plan=plan)

    first, others = (
        planned(Work.last(900, 50)),
        [planned(Work.last(3, 3), *(Work.last(400, 30),) * 4), planned(Work.last(1999, 160))],
    )
    out = first.output()
    config = default_config(first.dims, BF16, 4, 227 << 10)._replace(turns_once=turns_once)
    arguments = {"cos": first.cos, "sin": first.sin, "scale": first.scale, "out": out, "config": config}
    attend(*first.arguments[:4], **arguments)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*first.arguments[:4], **arguments)  # type: ignore[arg-type]
    for other in others:
        first.plan.update(other.plan)
        out.fill_(math.nan)
        graph.replay()
        assert relative_error(out, other.solve()) < TOLERANCES[BF16]


@pytest.mark.gpu
def test_on_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    problem = Problem.random(HeadDims(4, 64, 64, 64), num_lanes=20, device="cuda:1", dtype=BF16)
    assert kernel_error(problem, Config(64, 32, 4, 2)) < TOLERANCES[BF16]
