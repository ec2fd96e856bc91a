"""The kernel is its reference's twin: in Triton's interpreter here, and the same on a GPU, in every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle

import pytest
import torch

from hypic_kernels import available, interpreted
from hypic_kernels.attention import (
    Chip,
    Config,
    HeadDims,
    LayoutError,
    attend,
    attend_latent,
    chip_of,
    default_config,
    plan_of,
)
from hypic_kernels.attention.check import TOLERANCES, Variant
from hypic_kernels.attention.layout import candidates, layouts
from hypic_kernels.attention.plan import ChainQueries
from hypic_kernels.attention.problem import SMALL, Problem, Work
from hypic_kernels.trust import relative_error

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = 2e-6
LAYOUT = Config(16, 32, 4, 1)
HEADS = [
    HeadDims(2, 64, 64, 64),
    HeadDims(1, 96, 96, 48),
    HeadDims(3, 128, 128, 128),
    HeadDims(1, 192, 128, 64),
    HeadDims(8, 256, 256, 64),
    HeadDims(5, 40, 24, 8),
    HeadDims(2, 64, 96, 0),
    HeadDims(1, 3, 1, 2),
    HeadDims(4, 32, 96, 32, is_latent=True),
    HeadDims(4, 16, 32, 0, is_latent=True),
]
WORKS = [
    (Work.last(1, 1),),
    (Work.last(16, 16),),
    (Work.last(17, 2), Work.last(15, 15)),
    (Work(0, ()), Work.last(33, 5), Work(0, ())),
    (Work(64, ((0, 1), (15, 2), (31, 3), (47, 1), (63, 1))),),
]

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
# The interpreter computes both sides of a choice: a division by zero where nothing was seen is not used.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")


def kernel_error(problem: Problem, config: Config = LAYOUT, out_dtype: torch.dtype | None = None) -> float:
    """The kernel's error against float64, after a look that it left its inputs alone."""
    inputs = (problem.q, problem.keys, problem.values, problem.plan.buffer)
    copies = [tensor.clone() for tensor in inputs]
    out = problem.run(config, out_dtype)
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())
    return relative_error(out, problem.solve())


# -- in the interpreter: fp32 arithmetic ---------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize(("dims", "num_lanes"), list(zip(HEADS, cycle([0, 20]), strict=False)), ids=str)
def test_kernel_equals_reference(dims: HeadDims, num_lanes: int) -> None:
    """Slots that no chain names are NaN, and so is all of ``out``, of which rows without a tile stay so."""
    heads = 2 if dims.group == 1 and not dims.is_latent else 1
    problem = Problem.random(dims, num_key_heads=heads, num_lanes=num_lanes, spare=1)
    assert kernel_error(problem) < TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("works", WORKS, ids=str)
@pytest.mark.parametrize("tile", [1, 3, 16])
def test_kernel_takes_any_length(works: tuple[Work, ...], tile: int) -> None:
    assert kernel_error(Problem.random(HeadDims(2, 16, 16, 16), works, tile=tile, num_key_heads=1)) < TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("num_lanes", [4, 6, 9])
def test_parts_add_up(num_lanes: int) -> None:
    """Two tiles, of which one has up to five parts, and the other is written at once."""
    works = (Work.last(70, 3), Work(0, ()), Work.last(1, 1))
    problem = Problem.random(HeadDims(2, 16, 16, 16), works, num_lanes=num_lanes, num_key_heads=1)
    parts = problem.plan.tile_parts.tolist()
    assert max(parts) > 1 == min(parts) and sum(parts) == min(num_lanes, 6)
    assert kernel_error(problem, Config(16, 16, 4, 1)) < TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("group", [5, 16])
def test_a_group_is_cut_where_it_does_not_fit(group: int) -> None:
    """Four heads a program, of 5 and 16 that share a key: the last block of the five is a single head."""
    problem = Problem.random(HeadDims(group, 16, 16, 0), [Work.last(20, 6)], num_key_heads=2)
    config = Config(16, 16, 4, 1)
    assert config.num_heads(problem.plan.tile, group) == 4
    assert kernel_error(problem, config) < TOLERANCE


@needs_interpreter
def test_keys_turn_by_the_positions_given() -> None:
    problem = Problem.random(HeadDims(2, 32, 32, 16), is_moved=True, num_lanes=20, num_key_heads=1)
    assert kernel_error(problem) < TOLERANCE
    ordinary = replace(problem, plan=replace(problem.plan, key_positions=None))
    assert relative_error(ordinary.run(LAYOUT), problem.solve()) > 100 * TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("dims", [HeadDims(1, 40, 24, 24), HeadDims(2, 16, 32, 16, is_latent=True)], ids=str)
def test_turning_once_changes_nothing(dims: HeadDims, is_moved: bool) -> None:
    """Entries that belong to no chain, empty chains among them."""
    works = (Work(0, ()), Work.last(40, 3), Work(0, ()), Work.last(7, 7))
    problem = Problem.random(dims, works, is_moved=is_moved, spare=3, num_key_heads=1)
    once = LAYOUT._replace(turns_once=True)
    assert kernel_error(problem, once) < TOLERANCE
    assert torch.equal(problem.run(once).nan_to_num(), problem.run(LAYOUT).nan_to_num())


@needs_interpreter
def test_more_chains_than_are_counted_at_once() -> None:
    from hypic_kernels.attention.launching import CHAINS_AT_ONCE

    works = [Work.last(1 + number % 5, 1) for number in range(CHAINS_AT_ONCE + 3)]
    problem = Problem.random(HeadDims(1, 16, 16, 16), works, num_key_heads=1)
    assert kernel_error(problem, LAYOUT._replace(turns_once=True)) < TOLERANCE


@needs_interpreter
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_kernel_is_the_same_in_any_layout(block_n: int) -> None:
    problem = Problem.random(HeadDims(4, 32, 32, 16), tile=16, num_key_heads=1)
    assert kernel_error(problem, Config(64, block_n, 8, 2, "tf32x3")) < TOLERANCE


@needs_interpreter
def test_kernel_in_half_precision() -> None:
    problem = Problem.random(HeadDims(2, 32, 32, 32), dtype=F16, num_key_heads=1)
    assert kernel_error(problem) < TOLERANCES[F16]
    assert kernel_error(replace(problem, q=problem.q.float()), out_dtype=F32) < TOLERANCES[F16]


@needs_interpreter
def test_large_scores_do_not_overflow() -> None:
    problem = Problem.random(HeadDims(2, 16, 16, 0), num_lanes=20, num_key_heads=1)
    assert kernel_error(replace(problem, scale=300.0)) < 1e-4


@needs_interpreter
def test_the_public_call_runs_the_kernel() -> None:
    check_public_call("cpu")


@needs_interpreter
def test_a_tile_larger_than_the_layout_is_refused() -> None:
    p = Problem.random(HeadDims(2, 16, 16, 0), tile=32)
    with pytest.raises(LayoutError, match="do not fit into 16 rows"):
        attend(*p.arguments[:4], scale=p.scale, backend="triton", config=LAYOUT)


@needs_interpreter
def test_segments_are_shared() -> None:
    check_sharing("cpu")


@needs_interpreter
def test_keys_behind_a_chain_are_not_read() -> None:
    check_no_leak("cpu", F32, LAYOUT)


@needs_interpreter
def test_the_self_check_measures_the_kernel() -> None:
    dims = HeadDims(2, 16, 16, 16)
    variant = Variant(torch.device("cpu"), dims, 1, F32, F32, F32, 32, True, True, Config(64, 64, 4, 1))
    assert variant.measure() < TOLERANCE < variant.tolerance


# -- what the tests above would see --------------------------------------------------------------------------------


def test_errors_show() -> None:
    """A key too many, an angle that is off by one position, or one row more than named: far over what is allowed."""
    problem = Problem.random(HeadDims(2, 32, 32, 32), spare=1)
    exact = problem.solve()
    assert problem.cos is not None and problem.sin is not None
    later = problem.plan.positions + 1
    seen = replace(
        problem, plan=replace(problem.plan, positions=later), cos=problem.cos.roll(1, 0), sin=problem.sin.roll(1, 0)
    )
    assert relative_error(seen.solve(), exact) > 100 * max(TOLERANCES[F32], TOLERANCE)
    lost = problem.values.clone()
    lost[problem.plan.slots[3].long()] = 0
    assert relative_error(replace(problem, values=lost).solve(), exact) > 100 * TOLERANCE
    extra = exact.clone()
    extra[-1] = 0
    assert relative_error(extra, exact) == math.inf


# -- shared with the tests on a GPU --------------------------------------------------------------------------------


def check_public_call(device: str) -> None:
    for dims, call in ((HeadDims(4, 64, 64, 64), attend), (HeadDims(4, 32, 64, 32, is_latent=True), attend_latent)):
        p = Problem.random(dims, num_lanes=20, num_key_heads=1, spare=1, device=device)
        out = p.output()
        given = call(*p.arguments[:4], cos=p.cos, sin=p.sin, scale=p.scale, out=out, backend="triton")
        assert given is out and relative_error(out, p.solve()) < 1e-5


def check_sharing(device: str) -> None:
    """Two chains hold one segment at different positions; the pool is read where it lies."""
    segment, other = torch.arange(20), torch.arange(20, 33)
    order = [torch.cat([segment, other]).numpy(), torch.cat([other, segment]).numpy()]
    plan = plan_of([ChainQueries(slots, torch.tensor([32]).numpy()) for slots in order], tile=1, device=device)
    drawn = Problem.random(HeadDims(2, 16, 16, 16), [Work.last(33, 2)], num_slots=33, device=device)
    problem = replace(drawn, plan=plan)
    assert kernel_error(problem) < TOLERANCE
    assert relative_error(problem.solve()[1], drawn.solve()[1]) > 100 * TOLERANCE


def check_no_leak(device: str, dtype: torch.dtype, config: Config) -> None:
    """Keys of a chain that lie behind its last query are NaN, and so are those of the next chain."""
    drawn = Problem.random(
        HeadDims(2, 64, 64, 64), [Work(61, ((20, 9),)), Work.last(40, 3)], dtype=dtype, device=device
    )
    hidden = drawn.plan.slots[29:61].long()
    for tensor in (drawn.keys, drawn.values):
        tensor[hidden] = math.nan
    assert kernel_error(drawn, config) < TOLERANCES[dtype]


# -- on a GPU ------------------------------------------------------------------------------------------------------

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
