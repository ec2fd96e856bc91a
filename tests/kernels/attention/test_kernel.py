"""The kernel is its reference's twin in Triton's interpreter, and what the tests would see."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from itertools import cycle

import pytest
import torch

from hypic_kernels import available, interpreted
from hypic_kernels.attention import Config, HeadDims, LayoutError, attend
from hypic_kernels.attention.check import TOLERANCES, Variant
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.trust import relative_error
from tests.kernels.attention.kernel_checks import (
    LAYOUT,
    TOLERANCE,
    WORKS,
    check_no_leak,
    check_public_call,
    check_sharing,
    kernel_error,
)

F32, F16 = torch.float32, torch.float16
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

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
# The interpreter computes both sides of a choice: a division by zero where nothing was seen is not used.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")


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
