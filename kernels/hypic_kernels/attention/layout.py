"""How heads are cut into tiles and how the kernel is laid out on the chip; plain numbers, so that Triton is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Precision = Literal["ieee", "tf32x3"]

SMALLEST_TILE = 16
"""The least extent of a matrix product's operands."""
WIDEST_HEAD = 256
WIDEST_LATENT = 512


class LayoutError(ValueError):
    """Sizes or strides that the kernel cannot take."""


def padded(size: int) -> int:
    """The power of two that a tile of ``size`` rows or columns takes."""
    return max(SMALLEST_TILE, 1 << (size - 1).bit_length())


def pieces(width: int) -> tuple[int, int]:
    """``width`` channels as one or two tiles, each a power of two: 192 is 128 and 64, where one tile would take 256."""
    if width == 0:
        return 0, 0
    whole, first = padded(width), 1 << (width.bit_length() - 1)
    if first < SMALLEST_TILE or first == width or first + padded(width - first) >= whole:
        return whole, 0
    return first, padded(width - first)


@dataclass(frozen=True)
class HeadDims:
    """Sizes of the heads: ``group`` query heads read one key head; keys of ``key_dim`` channels, of which the first
    ``rotary_dim`` turn, and values of ``value_dim``. ``is_latent``: values are keys as well (MLA), beside ``key_dim``.
    """

    group: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    is_latent: bool = False

    @property
    def half(self) -> int:
        """Channels in each half of the pairs that turn; a latent's extra key is two halves, turning or not."""
        return (self.key_dim if self.is_latent else self.rotary_dim) // 2

    @property
    def rest(self) -> int:
        """Channels of a query that meet keys as they are stored."""
        return self.value_dim if self.is_latent else self.key_dim - self.rotary_dim

    @property
    def key_pieces(self) -> tuple[int, int, int, int]:
        """Tiles of a key: two halves and one or two of the rest; 0 where there is none."""
        half = padded(self.half) if self.half else 0
        return (half, half, *pieces(self.rest))


class Config(NamedTuple):
    """How the kernel is laid out on the chip.

    ``block_n`` keys are read at a time. ``num_stages``: a key's address is itself loaded, so 1 loads keys when they
    are needed and 3 while those before them are used; 2 does so for the addresses alone. ``precision`` of products
    of float32 numbers: as they are, or three TF32 products on matrix units; 16-bit numbers do not need it.
    """

    block_n: int
    num_warps: int
    num_stages: int
    precision: Precision = "ieee"


class Choice(NamedTuple):
    """What fits one case: query tokens a tile, parts that keys are split into, and the layout."""

    tile: int
    num_splits: int
    config: Config


def rows_of(tile: int, group: int) -> int:
    """Rows of a product that a tile of ``tile`` tokens takes."""
    return padded(tile * group)


def candidates(dims: HeadDims, dtype: torch.dtype) -> list[tuple[int, Config]]:
    """Tokens a tile and layout, of everything that may be chosen or is worth a measurement; each of them is tested."""
    if dtype == torch.float32:
        shapes = [(16, 16, 4, 1), (16, 32, 4, 1), (32, 32, 4, 1)]
        precisions: tuple[Precision, ...] = ("ieee", "tf32x3")
        return [(_tile(m, dims), Config(n, w, s, p)) for m, n, w, s in shapes for p in precisions]
    if dims.is_latent:
        shapes = [(16, 16, 4, 1), (16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2)]
    else:
        shapes = [(m, n, w, s) for m, w in ((16, 4), (32, 4), (64, 4), (128, 8)) for n in (32, 64) for s in (2, 3)]
        shapes += [(64, 128, 4, 2), (128, 128, 8, 2), (16, 16, 4, 2), (16, 128, 4, 3)]
    return list(dict.fromkeys((_tile(m, dims), Config(n, w, s)) for m, n, w, s in shapes))


def _tile(num_rows: int, dims: HeadDims) -> int:
    """Tokens whose heads fill ``num_rows`` rows, one at least."""
    return max(1, num_rows // dims.group)


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What one program may take of shared memory, by compute capability."""
def choose(): ...
