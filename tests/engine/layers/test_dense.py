"""Rows that are run whole: which way each takes, what filling up changes, and plans before the first request."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.engine.kernel_tiles import Tiling
from hypic.engine.layers import dense
from hypic.engine.layers.dense import PLANNED_FROM, UNIT, Heads, Way
from hypic.engine.rehearsal import Limits, Makings, plan_rows, sized_steps
from hypic_kernels.trust import relative_error
from tests.engine.layers.dense_rows import (
    CPU,
    CUDA,
    HALF,
    KINDS,
    LENGTHS,
    LIMIT,
    SMALL,
    always,
    drawn,
    exactly,
    noted_shapes,
    spans_of,
)

# -- which way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_long_rows_are_filled_up_and_others_go_through_flash_attention(head_dim: int, dtype: torch.dtype) -> None:
    heads = Heads(CUDA, dtype, 8, 2, head_dim)
    lengths = [1, 512, PLANNED_FROM - 1, PLANNED_FROM, PLANNED_FROM + 1, 16 * UNIT]
    assert [dense.way_of(heads, n) for n in lengths] == [*["flash"] * 3, *["planned"] * 3]


@pytest.mark.parametrize(
    "heads",
    [
        Heads(CPU, torch.bfloat16, 8, 2, 64),
        Heads(CUDA, torch.float32, 8, 2, 64),
        Heads(CUDA, torch.float64, 8, 2, 64),
        Heads(CUDA, torch.bfloat16, 8, 2, 60),
        Heads(CUDA, torch.bfloat16, 8, 2, 264),
    ],
    ids=["cpu", "float32", "float64", "odd", "wide"],
)
def test_all_others_are_torchs_choice(heads: Heads) -> None:
    assert {dense.way_of(heads, n) for n in (512, PLANNED_FROM, 16 * UNIT)} == {"whole"}


def test_torch_says_what_it_would_take() -> None:
    """cuDNN for nothing on a CPU, so that nothing is filled up in vain."""
    assert not dense.has_plans(SMALL)
    assert dense.tried("planned", SMALL) == "whole" == dense.tried("whole", SMALL)


# -- filling up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_that_is_filled_up_is_the_same(length: int, scale: float | None) -> None:
    q, k, v = drawn(SMALL, length)
    found = dense.planned(q, k, v, scale)
    assert found.shape == q.shape and relative_error(found, exactly(q, k, v, scale)) < LIMIT


@pytest.mark.parametrize("length", [n for n in LENGTHS if n % UNIT])
def test_padding_in_front_or_in_sight_shows(length: int) -> None:
    q, k, v = drawn(SMALL, length)
    target = dense.planned_length(length)
    front = [torch.cat([x.new_zeros(target - length, *x.shape[1:]), x]) for x in (q, k, v)]
    assert relative_error(exactly(*front)[-length:], exactly(q, k, v)) > 100 * LIMIT
    behind = [torch.cat([x, x.new_zeros(target - length, *x.shape[1:])]).transpose(0, 1)[None] for x in (q, k, v)]
    seen = torch.nn.functional.scaled_dot_product_attention(*behind, enable_gqa=True)
    assert relative_error(seen[0].transpose(0, 1)[:length], exactly(q, k, v)) > 100 * LIMIT


def test_what_lay_in_memory_is_not_seen() -> None:
    """NaN in the place of zeros shows in every row, though its weights are 0."""
    q, k, v = drawn(SMALL, 3)
    filled = dense.filled_up(v, 8)
    assert bool((filled[3:] == 0).all()) and torch.equal(filled[:3], v)
    rows = [dense._side_by_side(dense.filled_up(x, 8)) for x in (q, k)]
    filled[3:] = torch.nan
    assert bool(dense.whole(*rows, dense._side_by_side(filled), None).isnan().any())


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_no_row_brings_a_shape_that_was_not_planned_for(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides included, wherever a row lies, whether it is copied or not; a control: rows as they come bring many."""
    seen = noted_shapes(monkeypatch)
    heads = Heads(CPU, torch.float32, 4, num_kv_heads, 8)
    plan_rows([heads], 70)
    known, joined = set(seen), torch.randn(200, 4 + 2 * num_kv_heads, 8)
    views = joined.split([4, num_kv_heads, num_kv_heads], dim=1)
    odd = [
        x.contiguous().view(-1).as_strided(x.shape, (8 * x.shape[1], 8 if x.shape[1] > 1 else 999, 1)) for x in views
    ]
    for rows in (views, odd):
        for span in spans_of([32, 33, 64, 70], first=1):
            dense.attend(*rows, [span], None, torch.empty(200, 4, 8), choose=always("planned"))
    assert seen == known and len(known) == 4
    dense.attend(*views, spans_of([32, 33, 64, 70], first=1), None, torch.empty(200, 4, 8), choose=always("whole"))
    assert len(seen - known) == 4


# -- rows of a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["flash", "planned", "whole"])
def test_every_row_sees_itself_alone(way: Way) -> None:
    """Rows of a step by each way; neighbours of one length are one product, but for those that are filled up."""
    spans, shapes = spans_of([40, 40, 57, 40], first=3), list[int]()
    q, k, v = drawn(SMALL, 190)
    out = torch.full_like(q, 7.0)

    def noted(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        shapes.append(len(q))
        return dense.whole(q, k, v, scale)

    dense.attend(q, k, v, spans, None, out, choose=always(way), product=noted)
    for span in spans:
        assert relative_error(out[span], exactly(q[span], k[span], v[span])) < LIMIT
    assert bool((out[:3] == 7).all() and (out[180:] == 7).all())
    assert shapes == ([2, 1, 1] if way == "flash" else [])
    assert relative_error(out[43:83], exactly(q[3:83], k[3:83], v[3:83])[40:]) > 100 * LIMIT


def test_a_rows_way_does_not_depend_on_its_company() -> None:
    asked = list[int]()

    def noted(heads: Heads, length: int) -> Way:
        assert heads == SMALL
        asked.append(length)
        return "whole"

    q, k, v = drawn(SMALL, 200)
    for lengths in ([40], [40, 40, 40], [9, 40, 100]):
        dense.attend(q, k, v, spans_of(lengths), None, torch.empty_like(q), choose=noted)
    assert asked == [40, 40, 9, 40, 100]


# -- plans before the first request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [100, PLANNED_FROM - 1, PLANNED_FROM, PLANNED_FROM + 1, 16 * UNIT - 1, 16 * UNIT])
def test_every_row_finds_its_plan_made(most: int) -> None:
    kinds = [Heads(CUDA, torch.bfloat16, 16, 2, dim) for dim in (128, 256)]
    made = list[tuple[Heads, int]]()
    plan_rows(kinds, most, lambda heads, length: made.append((heads, length)))
    asked = [n for n in range(1, most + 1) if dense.way_of(kinds[0], n) == "planned"]
    assert sorted({length for _, length in made}) == sorted({dense.planned_length(n) for n in asked})
    assert len(made) == len(set(made)) == 2 * len({length for _, length in made})


@pytest.mark.parametrize(("context", "most"), [(8 * UNIT, 5 * UNIT), (8 * UNIT, PLANNED_FROM), (300, 5 * UNIT)])
def test_rows_that_are_copied_to_be_filled_up_are_rehearsed(context: int, most: int) -> None:
    """They take more memory than the longest, which may lie as it is."""
    made = Makings(np.arange(16), context, (0, 0), (1, 2))
    steps = [
        sum(chain.num_tokens for chain in step) for step in sized_steps(made, Limits(most, 1, Tiling(), None), most)
    ]
    assert most in steps and (most - 1 in steps) == (context > PLANNED_FROM < most)


def test_plans_for_which_there_is_no_memory_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def short(heads: Heads, length: int) -> None:
        if length > 5 * UNIT:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    plan_rows([SMALL], 16 * UNIT, short)
    assert [record.getMessage() for record in caplog.records] == [
        f"no room for {6 * UNIT} tokens a step beside the pool; lower memory= or max_step_tokens="
    ]

    def broken(heads: Heads, length: int) -> None:
        raise RuntimeError("cuDNN error")

    with pytest.raises(RuntimeError, match="cuDNN"):
        plan_rows([SMALL], 16 * UNIT, broken)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "scale"), [*KINDS, (4, 1, 128, None)])
def test_flash_and_filled_up_rows_on_a_gpu(
    num_heads: int, num_kv_heads: int, head_dim: int, scale: float | None, dtype: torch.dtype
) -> None:
    heads = Heads(torch.device("cuda", 0), dtype, num_heads, num_kv_heads, head_dim, scale)
    assert dense.tried("flash", heads) == "flash"
    ways: list[tuple[Way, list[int]]] = [("flash", [512, 512, 777, 1023, 2049, 4095]), ("planned", [4096, 4097, 5001])]
    for way, lengths in ways:
        q, k, v = drawn(heads, sum(lengths))
        out = torch.empty_like(q)
        dense.attend(q, k, v, spans_of(lengths), scale, out, choose=always(way))
        for span in spans_of(lengths):
            exact = exactly(q[span], k[span], v[span], scale)
            assert relative_error(out[span], exact) < dense.TOLERANCES[dtype], (way, span)
            assert relative_error(out[span].roll(1, 0), exact) > 10 * dense.TOLERANCES[dtype]


@pytest.mark.gpu
def test_a_new_length_has_nothing_built_on_a_gpu() -> None:
    """Host time of lengths that come for the first time; a control: torch's choice builds a plan for each."""
    heads = Heads(torch.device("cuda", 0), torch.bfloat16, 16, 2, 256)
    if not dense.has_plans(heads):
        pytest.skip("torch takes nothing here that has plans")
    plan_rows([heads], 2 * PLANNED_FROM)
    q, k, v = drawn(heads, 2 * PLANNED_FROM)

    def host_s(length: int, way: Way) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        dense.attend(q, k, v, [slice(0, length)], None, torch.empty_like(q), choose=always(way))
        return time.perf_counter() - started

    ways: list[tuple[Way, list[int]]] = [
        ("flash", [519, 1037, 3001]),
        ("planned", [PLANNED_FROM + 7, 5003, 6007]),
    ]
    for way, lengths in ways:
        assert dense.tried(way, heads) == way
        host_s(lengths[0] + 1, way)
        ours = min(host_s(length, way) for length in lengths)
        theirs = min(host_s(length, "whole") for length in lengths)
        assert theirs > 10 * ours, (way, ours, theirs)
