"""Layouts exist for every chip, heads and type; heads are cut without much waste."""

from __future__ import annotations

import pytest
import torch

from hypic_kernels.attention import HeadDims, LayoutError, default_config
from hypic_kernels.attention.layout import HEADS, SHARED_BYTES, Chip, layouts, pieces


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_a_layout_is_found_for_every_chip(heads: str, dtype: torch.dtype, capability: int) -> None:
    dims, room = HEADS[heads], SHARED_BYTES[capability]
    found = layouts(dims, dtype, Chip(shared_bytes=room, runs_hopper=capability == 90))
    assert found and any(config.hopper for config in found) == (
        capability == 90 and dtype.itemsize == 2 and heads in ("64", "128", "256", "256-none")
    )
    for config, tile in found.items():
        assert config.shared_bytes(dims, dtype, room) <= room and config.block_m >= tile


def test_a_tile_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(LayoutError, match="plan smaller tiles"):
        default_config(HEADS["256"], torch.bfloat16, 129, SHARED_BYTES[90])


def test_chips_are_the_same_everywhere() -> None:
    pytest.importorskip("triton")
    from hypic_kernels import launch

    assert launch.SHARED_BYTES == SHARED_BYTES


@pytest.mark.parametrize("width", range(1, 513))
def test_pieces_cover_a_width(width: int) -> None:
    first, second = pieces(width)
    assert first + second >= width and all(n == 0 or (n >= 16 and n & (n - 1) == 0) for n in (first, second))
    assert first + second < 2 * max(16, width)


def test_a_key_in_pieces() -> None:
    assert HeadDims(1, 192, 192, 64).key_pieces == (32, 32, 128, 0)
    assert HeadDims(8, 256, 256, 64).key_pieces == (32, 32, 128, 64)
    assert HeadDims(32, 64, 512, 64, is_latent=True).key_pieces == (32, 32, 512, 0)
