"""Parts hold every key of every tile once, are no more than run at once, and are about equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic_kernels.attention.parts import MOST_ROUNDS, most_parts, shared_out

SEEN = st.lists(st.integers(0, 700), min_size=1, max_size=12)


@given(seen=SEEN, num_lanes=st.integers(0, 30), unit=st.integers(1, 130))
def test_every_key_is_in_one_part_of_its_tile(seen: list[int], num_lanes: int, unit: int) -> None:
    parts = shared_out(np.array(seen), num_lanes, unit)
    assert len(parts.tile) == parts.number.sum() <= most_parts(len(seen), num_lanes)
    for tile, keys in enumerate(seen):
        own = slice(parts.first[tile], parts.first[tile] + parts.number[tile])
        assert (parts.tile[own] == tile).all() and parts.number[tile] >= 1
        begins, ends = parts.begin[own].tolist(), parts.end[own].tolist()
        assert begins == [0, *ends[:-1]] and ends[-1] == keys
        assert all(begin % unit == 0 and (begin < end or keys == 0) for begin, end in zip(begins, ends, strict=True))


@given(seen=SEEN, num_lanes=st.integers(1, 30))
def test_longest_parts_come_first_and_none_could_be_shorter(seen: list[int], num_lanes: int) -> None:
    parts = shared_out(np.array(seen), num_lanes, 1)
    lengths = parts.end - parts.begin
    whole = [int(lengths[first]) for first in dict.fromkeys(parts.first[parts.tile].tolist())]
    assert whole == sorted(whole, reverse=True)
    shorter, rounds = int(lengths.max()) - 1, -(-len(parts.tile) // num_lanes)
    if len(seen) <= MOST_ROUNDS * num_lanes and shorter > 0:
        assert sum(max(1, -(-keys // shorter)) for keys in seen) > rounds * num_lanes


def test_a_prompt_of_segments_fills_the_chip_once() -> None:
    """16 tiles that see between 1,000 and 16,500 keys, on 66 lanes: one round, of which the longest part is within an
    eighth of the mean; equal numbers of parts would take more than twice as long."""
    seen = np.array([(2 * n + 1) * 1024 + 8 for n in range(8)] + [16384 + 16 * n for n in range(1, 9)])
    parts = shared_out(seen, 66)
    assert 60 < len(parts.tile) <= 66
    assert (parts.end - parts.begin).max() < 1.13 * seen.sum() / 66


@pytest.mark.parametrize("num_tiles", [1, 10, 66, 67, 100, 132, 200, 264])
def test_equal_tiles_end_about_together(num_tiles: int) -> None:
    """67 tiles on 66 lanes: whole ones would take two rounds for the work of one."""
    parts = shared_out(np.full(num_tiles, 128 * 40), 66)
    assert len(parts.tile) <= most_parts(num_tiles, 66)
    rounds = -(-len(parts.tile) // 66)
    assert rounds * (parts.end - parts.begin).max() <= 1.4 * max(128 * 40 * num_tiles / 66, 128)


@pytest.mark.parametrize("num_tiles", [265, 1000])
def test_many_tiles_are_whole(num_tiles: int) -> None:
    parts = shared_out(np.full(num_tiles, 5000), 66)
    assert (parts.number == 1).all() and len(parts.tile) == most_parts(num_tiles, 66)


def test_no_tiles() -> None:
    assert [len(each) for each in shared_out(np.zeros(0, dtype=np.int32), 66)] == [0] * 5
