"""Plans name every token once, hold what was given, fit where they are told to, and are quick to make."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypic_kernels.attention import ChainQueries, PlanError, PlanSizes, plan_of
from hypic_kernels.attention.problem import Work

WORKS = st.lists(
    st.integers(0, 40).flatmap(lambda n: st.builds(Work.last, st.just(n), st.integers(0, n))), min_size=1, max_size=6
)


def chains_of(works: list[Work]) -> list[ChainQueries]:
    return [
        ChainQueries(np.arange(work.length) * 7 + place, np.asarray(work.positions, dtype=np.int64))
        for place, work in enumerate(works)
    ]


@given(works=WORKS, tile=st.integers(1, 9))
def test_every_token_stands_in_one_tile_of_its_chain(works: list[Work], tile: int) -> None:
    plan = plan_of(chains_of(works), tile=tile)
    owner = [chain for chain, work in enumerate(works) for _ in work.positions]
    named: list[int] = []
    for chain, first, count in zip(
        *(t.tolist() for t in (plan.tile_chain, plan.tile_first, plan.tile_count)), strict=True
    ):
        assert 0 <= count <= tile
        named += range(first, first + count)
        assert all(owner[token] == chain for token in range(first, first + count))
    assert sorted(named) == list(range(len(owner)))


@given(works=WORKS, spare=st.integers(0, 5))
def test_contents_are_those_given_and_padding_is_nothing(works: list[Work], spare: int) -> None:
    chains = chains_of(works)
    small = plan_of(chains, tile=3)
    plan = plan_of(chains, tile=3, sizes=PlanSizes(*(number + spare for number in small.sizes)))
    for chain, start, length in zip(chains, plan.starts.tolist(), plan.lengths.tolist(), strict=False):
        assert plan.slots[start : start + length].tolist() == chain.slots.tolist()
    positions = [position for work in works for position in work.positions]
    assert plan.positions.tolist()[: len(positions)] == positions
    num_tiles = sum(-(-len(work.positions) // 3) for work in works)
    assert plan.tile_count[num_tiles:].sum() == 0 and len(plan.tile_count) == small.sizes.num_tiles + spare


def test_tiles_that_see_most_come_first() -> None:
    plan = plan_of([(np.arange(50), np.arange(0, 50, 10)), (np.arange(90), np.array([88, 89]))], tile=2)
    last = [
        int(plan.positions[f + c - 1]) for f, c in zip(plan.tile_first.tolist(), plan.tile_count.tolist(), strict=True)
    ]
    assert last == sorted(last, reverse=True)


def test_sections_are_aligned() -> None:
    plan = plan_of(chains_of([Work.last(37, 5), Work.last(3, 3)]), tile=2)
    for section in (plan.slots, plan.starts, plan.lengths, plan.positions, plan.tile_chain, plan.tile_count):
        assert section.storage_offset() % 32 == 0 and section.dtype == torch.int32


def test_update_takes_over_all_contents() -> None:
    sizes = PlanSizes(100, 3, 9, 8)
    first = plan_of(chains_of([Work.last(30, 4)]), tile=2, sizes=sizes)
    second = plan_of(chains_of([Work.last(11, 3), Work.last(60, 5)]), tile=2, sizes=sizes)
    slots = first.slots
    assert not torch.equal(first.buffer, second.buffer)
    first.update(second)
    assert torch.equal(first.buffer, second.buffer) and first.slots is slots
    assert slots[:11].tolist() == [7 * n for n in range(11)]


def test_keys_may_turn_by_other_positions() -> None:
    plan = plan_of(
        [ChainQueries(np.arange(3), np.array([2]), np.array([5, 0, 9])), (np.arange(2), np.array([1]))], tile=1
    )
    assert plan.key_positions is not None and plan.key_positions.tolist() == [5, 0, 9, 0, 1]


@pytest.mark.parametrize(
    ("works", "tile", "sizes", "message"),
    [
        ([], 1, None, "0 chains"),
        ([Work.last(3, 1)], 0, None, "tiles of 0"),
        ([Work.last(3, 1)], 1, PlanSizes(2, 1, 1, 1), "do not fit"),
        ([Work.last(3, 2)], 1, PlanSizes(3, 1, 2, 1), "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(works: list[Work], tile: int, sizes: PlanSizes | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(chains_of(works), tile=tile, sizes=sizes)


def test_other_sizes_are_not_taken_over() -> None:
    plan = plan_of(chains_of([Work.last(9, 2)]), tile=1)
    split = plan_of(chains_of([Work.last(9, 2)]), tile=1, num_lanes=2, sizes=plan.sizes)
    for other in (plan_of(chains_of([Work.last(40, 2)]), tile=1), split):
        with pytest.raises(PlanError, match="cannot be copied"):
            plan.update(other)


def test_planning_is_quick() -> None:
    """64 chains that share 16,384 slots each way; a loop over tokens would take a hundred times as long."""
    slots = np.arange(512, dtype=np.int32)
    chains = [ChainQueries(slots, np.array([511])) for _ in range(64)]
    fastest = min(_seconds(chains) for _ in range(20))
    assert fastest < 5e-3


def _seconds(chains: list[ChainQueries]) -> float:
    start = time.perf_counter()
    plan_of(chains, tile=1)
    return time.perf_counter() - start
