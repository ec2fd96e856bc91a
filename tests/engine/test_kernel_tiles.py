"""Tilings follow head sizes and memory; tiles of a step name every row once, and parts every key that they see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hypic.engine.chain import Chain, RowLink
from hypic.engine.kernel_tiles import MOST_TURNED_BYTES, Tiling, tile_arrays, tiling_of
from hypic_kernels.attention import HeadDims

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("dims", "num_key_heads", "dtype", "expected"),
    [
        (HeadDims(8, 256, 256, 64), 2, BF16, (16, 16)),
        (HeadDims(4, 256, 256, 64), 4, BF16, (32, 32)),
        (HeadDims(1, 128, 128, 128), 16, BF16, (32, 128)),
        (HeadDims(16, 128, 128, 128), 2, BF16, (16, 16)),
        (HeadDims(32, 64, 512, 64, is_latent=True), 1, BF16, (16, 16)),
        (HeadDims(8, 256, 256, 64), 2, torch.float32, (16, 16)),
        (HeadDims(8, 256, 256, 64), 2, torch.float64, (16, 16)),
    ],
    ids=str,
)
def test_tiles_fill_a_program(
    dims: HeadDims, num_key_heads: int, dtype: torch.dtype, expected: tuple[int, int]
) -> None:
    tiling = tiling_of([(dims, num_key_heads)], dtype, CPU)
    assert (tiling.short, tiling.long) == expected
    assert min(tiling.short_lanes, tiling.long_lanes, tiling.decode_lanes) >= 1


def test_heads_of_several_kinds_take_what_fits_all() -> None:
    both = [(HeadDims(1, 128, 128, 128), 16), (HeadDims(8, 256, 256, 64), 2)]
    tiling = tiling_of(both, BF16, CPU)
    assert (tiling.short, tiling.long, tiling.turned_bytes) == (16, 16, 16 * 128 * 2)
    assert tiling_of([], BF16, CPU) == Tiling()


def test_a_recorded_step_turns_keys_once_where_there_is_room() -> None:
    tiling = Tiling(turned_bytes=256)
    assert tiling.most_keys(1, 262_144) == 262_144 and tiling.most_keys(8, 262_144) == 0
    assert tiling.most_keys(2, 262_144) * 256 == MOST_TURNED_BYTES and Tiling().most_keys(1, 4096) == 0


def chains_of(rows: list[list[tuple[int, int]]]) -> tuple[list[Chain], list[slice], np.ndarray]:
    """Chains of rows (position, number of tokens), their spans and all positions."""
    chains, spans, positions = [], [], []
    for number, links in enumerate(rows):
        length = links[-1][0] + links[-1][1]
        slots = np.arange(length) + 1000 * number
        parts = [RowLink([0] * num, first, slots[first : first + num]) for first, num in links]
        spans.append(slice(len(positions), len(positions) + sum(num for _, num in links)))
        positions += [first + n for first, num in links for n in range(num)]
        chains.append(Chain(parts, slots, 0, 1, wants_logits=number != 1))
    return chains, spans, np.asarray(positions, dtype=np.int32)


STEPS = {
    "warm": [[(0, 8), (500, 8), (900, 70)], [(10, 3)], [(0, 300)]],
    "decode": [[(700, 1)], [(3, 1)], [(129, 1)]],
}


@pytest.mark.parametrize("dense", [None, 2])
@pytest.mark.parametrize("tile", [1, 16, 32])
@pytest.mark.parametrize("name", STEPS)
def test_tiles_name_every_row_once_and_parts_every_key(name: str, tile: int, dense: int | None) -> None:
    chains, spans, positions = chains_of(STEPS[name])
    found = {"positions": positions, "finals": np.asarray([spans[0].stop - 1, spans[2].stop - 1])}
    made = tile_arrays(chains, spans, [n == dense for n in range(3)], found, tile, Tiling(short=16, long=32))
    named = [t for f, c in zip(made["tile_first"], made["tile_count"], strict=True) for t in range(f, f + c)]
    assert named == [t for n, span in enumerate(spans) for t in range(span.start, span.stop) if n != dense]
    for prefix, asked in (("", positions), ("final_", positions[found["finals"]])):
        tiles = (made[f"{prefix}tile_{each}"] for each in ("chain", "first", "count", "part", "parts"))
        for chain, first, count, part, num in zip(*tiles, strict=True):
            own = slice(part, part + num)
            ends = made[f"{prefix}part_end"][own].tolist()
            assert made[f"{prefix}part_begin"][own].tolist() == [0, *ends[:-1]]
            assert ends[-1] == asked[first + count - 1] + 1 <= len(chains[chain].context)
    assert made["final_tile_chain"].tolist() == [0, 2] and all(v.dtype == np.int32 for v in made.values())


def test_long_rows_take_long_tiles_but_not_where_the_tile_is_given() -> None:
    tiling, short, long = Tiling(short=32, long=128), chains_of(STEPS["warm"])[0], chains_of([[(0, 300)]])[0]
    assert tiling.tile(short, is_decode=False, is_recorded=False) == 32
    assert tiling.tile(long, is_decode=False, is_recorded=False) == 128
    assert tiling.tile(long, is_decode=False, is_recorded=True) == 32
    assert tiling.tile(long, is_decode=True, is_recorded=False) == 1
