"""How heads are cut into tiles and how the kernel is laid out on the chip; plain numbers, no Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Precision = Literal["ieee", "tf32x3"]

SMALLEST_TILE = 16
"""The least extent of a matrix product's operands."""
WIDEST_HEAD = 256
WIDEST_LATENT = 512
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What one program may take of shared memory, by compute capability (80 is 8.0)."""
MOST_ROWS = 128
TILES_TO_TURN_ONCE = 8
"""Tiles of a chain, from which on its keys are turned before they are asked."""
RESERVED_BYTES = 1 << 10
"""Shared memory that the system takes of every program."""
MOST_WARPS = 8
"""Warps of a processor, with as many registers as each of them takes."""


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
    def query_dim(self) -> int:
        return self.key_dim + (self.value_dim if self.is_latent else 0)

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

    def check(self) -> None:
        """
        Raises:
            LayoutError: more channels than the kernel takes, or an odd number of them in pairs.
        """
        widest = WIDEST_LATENT if self.is_latent else WIDEST_HEAD
        if not (0 < self.key_dim <= WIDEST_HEAD and 0 < self.value_dim <= widest):
            raise LayoutError(
                f"heads have {self.key_dim} and {self.value_dim} channels; they may have 1 to {WIDEST_HEAD}, and "
                f"latents up to {WIDEST_LATENT}."
            )
        if self.rotary_dim > self.key_dim:
            raise LayoutError(f"cos and sin turn {self.rotary_dim} channels, keys have {self.key_dim}.")
        if self.is_latent and (self.key_dim % 2 or self.rotary_dim not in (0, self.key_dim)):
            raise LayoutError(
                f"{self.rotary_dim} of {self.key_dim} channels beside a latent turn; all must or none, in pairs."
            )


class Config(NamedTuple):
    """How the kernel is laid out on the chip.

    ``block_m`` rows of a product are tokens of a tile times the heads that share a key, as many heads as fit.
    ``block_n`` keys are read at a time. ``num_stages``: a key's address is itself loaded, so 1 loads keys when they
    are needed, 2 while those before them are used, and 3 loads addresses ahead too. ``precision`` of products of
    float32 numbers: as they are, or three TF32 products on matrix units; 16-bit numbers do not need it.
    ``turns_once``: keys are turned in a launch of their own, into a scratch, not by every tile that reads them.
    ``hopper``: the kernel of ``hopper.py``, which has two stages always.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    precision: Precision = "ieee"
    turns_once: bool = False
    hopper: bool = False

    def num_heads(self, tile: int, group: int) -> int:
        """Heads of a group that a program takes."""
        return min(group, self.block_m // tile)

    def shared_bytes(self, dims: HeadDims, dtype: torch.dtype, limit: int) -> int:
        """Shared memory of the kernel, at most, as read off compiled ones for chips where a program has ``limit``."""
        if self.hopper:
            block = 2 * self.block_n * (dims.key_dim + dims.value_dim)
            return (self.block_m * dims.key_dim + block) * dtype.itemsize + 1024
        half, _, *rest = dims.key_pieces
        size, values, turning = dtype.itemsize, sum(pieces(dims.value_dim)), 2 * half
        is_split = size == 4 and self.precision == "tf32x3"
        stored = values if dims.is_latent and not is_split else sum(rest) + values
        queries = self.block_m * (turning + sum(rest)) * size
        if self.num_stages == 1:
            key, queries = (stored + turning + self.block_m) * size, queries * (3 if is_split else 2) // 2
        else:
            # Matrix units of a warp group read operands where they were loaded: that takes a second buffer, and a
            # third for latents, which are read both ways. Halves that turn go there once more when they have.
            is_wide = self.block_m >= 64 and limit > SHARED_BYTES[80]
            num_buffers = (2 + dims.is_latent) if is_wide else 1
            tables = 2 * half * 4 if dims.rotary_dim and not self.turns_once else 0
            held = (num_buffers if self.turns_once else 1 + is_wide) * turning
            key = (num_buffers * stored + held + self.block_m) * size + tables + 16
        return max(queries + self.block_n * key, self.block_m * values * 4)


class Choice(NamedTuple):
    """What fits one case: query tokens a tile, lanes that keys are shared out over (0: keys of a tile stay together),
    and the layout."""

    tile: int
    num_lanes: int
    config: Config


class Chip(NamedTuple):
    """What layouts depend on: multiprocessors, shared memory that a program may take, whether ``hopper.py`` runs."""

    num_processors: int = 132
    shared_bytes: int = SHARED_BYTES[90]
    runs_hopper: bool = True


@dataclass(frozen=True)
class Load:
    """What is known of a case beforehand: sizes, the longest chain in keys, and the chip."""

    num_tokens: int
    num_chains: int
    num_keys: int
    num_key_heads: int
    chip: Chip = Chip()

    @property
    def tokens_per_chain(self) -> int:
        return -(-self.num_tokens // max(1, self.num_chains))


def choose(dims: HeadDims, dtype: torch.dtype, load: Load) -> Choice:
    """Tile, lanes and layout for a case, from sizes alone; the same for any contents."""
    chip = load.chip
    rows = min(padded(load.tokens_per_chain * dims.group), most_rows(dims, dtype, chip.shared_bytes))
    tile = max(1, min(load.tokens_per_chain, rows // dims.group))
    is_read_often = load.tokens_per_chain >= tile * TILES_TO_TURN_ONCE
    config = preferred(dims, dtype, tile, is_read_often or _takes_hopper(dims, dtype, tile, chip), chip)[0]
    return Choice(tile, num_lanes(dims, dtype, tile, config, load.num_key_heads, chip), config)


@functools.cache
def preferred(dims: HeadDims, dtype: torch.dtype, tile: int, turns_once: bool, chip: Chip) -> tuple[Config, ...]:
    """Layouts for a plan, the better first; ``turns_once`` as in ``Plan``."""
    by_hand = hopper_config(dims, dtype, tile) if chip.runs_hopper and (turns_once or not dims.rotary_dim) else None
    plain = default_config(dims, dtype, tile, chip.shared_bytes)
    plain = plain._replace(turns_once=turns_once and dims.rotary_dim > 0)
    return (plain,) if by_hand is None else (by_hand, plain)


def _takes_hopper(dims: HeadDims, dtype: torch.dtype, tile: int, chip: Chip) -> bool:
    return chip.runs_hopper and hopper_config(dims, dtype, tile) is not None


def num_lanes(dims: HeadDims, dtype: torch.dtype, tile: int, config: Config, num_key_heads: int, chip: Chip) -> int:
    """Parts that run at once: programs that there is room for, over those that one part takes."""
    blocks = -(-dims.group // config.num_heads(tile, dims.group)) * num_key_heads
    taken = config.shared_bytes(dims, dtype, chip.shared_bytes) + RESERVED_BYTES
    at_once = max(1, min((chip.shared_bytes + RESERVED_BYTES) // taken, MOST_WARPS // config.num_warps))
    return max(1, chip.num_processors * at_once // blocks)


def default_config(dims: HeadDims, dtype: torch.dtype, tile: int, shared_bytes: int) -> Config:
    """The layout that is used unless a caller names one: the first of a list that the chip has room for.

    Raises:
        LayoutError: a tile of more tokens than any layout has rows.
    """
    most = most_rows(dims, dtype, shared_bytes)
    if tile > most:
        raise LayoutError(
            f"a tile of {tile} tokens is more than the {most} rows of a program here; plan smaller tiles."
        )
    rows = min(padded(tile * dims.group), most)
    if dtype == torch.float32:
        found = [Config(rows, 16, 8, 1)] if dims.is_latent else [Config(rows, n, 8, 1, "tf32x3") for n in (32, 16)]
    else:
        num_warps = 8 if rows >= 128 or (dims.is_latent and rows >= 64) else 4
        keys = ((32, 3), (16, 3), (16, 1)) if dims.is_latent else ((64, 3), (32, 3), (16, 3), (32, 1), (16, 1))
        found = [Config(rows, n, num_warps, s) for n, s in keys]
    fitting = (config for config in found if config.shared_bytes(dims, dtype, shared_bytes) <= shared_bytes)
    return next(fitting, found[-1])


def hopper_config(dims: HeadDims, dtype: torch.dtype, tile: int) -> Config | None:
    """The layout of ``hopper.py``; ``None`` where it does not take the heads, or most of its rows would be empty."""
    rotary_fits = dims.rotary_dim in (0, 64, 128, 256)
    takes = not dims.is_latent and {dims.key_dim, dims.value_dim} <= {64, 128, 256} and rotary_fits
    rows = tile * min(dims.group, 128 // tile) if tile <= 128 else 0
    if not takes or dtype.itemsize != 2 or rows < 64:
        return None
    block_n = 64 if dims.key_dim + dims.value_dim > 256 else 128
    return Config(128, block_n, 8, 2, "ieee", dims.rotary_dim > 0, True)


def most_rows(dims: HeadDims, dtype: torch.dtype, shared_bytes: int) -> int:
    """Rows beyond which sums of values no longer fit into registers, or queries into shared memory."""
    is_large = shared_bytes > SHARED_BYTES[80]
    if dtype == torch.float32:
        return 16 if dims.is_latent else 32
    if dims.is_latent:
        return 64 if is_large else 16
    return MOST_ROWS if is_large or dims.value_dim <= 128 else 64


def candidates(dims: HeadDims, dtype: torch.dtype) -> list[tuple[int, Config]]:
    """Tokens a tile and layout, of everything that may be chosen or is worth a measurement; each of them is tested."""
    if dtype == torch.float32:
        rows, precisions = (16,) if dims.is_latent else (16, 32), ("ieee", "tf32x3")
        layouts = [Config(m, n, w, 1, p) for m in rows for n in (16, 32) for w in (4, 8) for p in precisions]  # type: ignore[arg-type]
    elif dims.is_latent:
        layouts = [Config(m, n, w, s) for m, w in ((16, 4), (32, 4), (64, 8)) for n in (16, 32, 64) for s in (1, 3)]
    else:
        small = [Config(m, n, 4, s) for m in (16, 32, 64) for n in (16, 32, 64) for s in (1, 2, 3)]
        large = [Config(m, n, 8, s) for m in (64, 128) for n in (32, 64) for s in (1, 2, 3)]
        layouts = [*small, *large, Config(16, 128, 4, 3), Config(16, 64, 8, 3), Config(128, 128, 8, 3)]
    if dims.rotary_dim:
        layouts += [config._replace(turns_once=True) for config in layouts if config.num_stages == 3]
    return [(max(1, config.block_m // dims.group), config) for config in layouts]


def scratch_numbers(num_parts: int, tile: int, num_heads: int, value_dim: int) -> int:
    """float32 numbers that the parts of a plan that is split take."""
    return num_parts * tile * num_heads * (value_dim + 1)


TILES = (1, 4, 16, 64)
"""Tokens a tile, from decode to prefill."""
HEADS = {
    "64": HeadDims(4, 64, 64, 64),
    "96": HeadDims(4, 96, 96, 96),
    "128": HeadDims(4, 128, 128, 128),
    "192": HeadDims(4, 192, 192, 64),
    "192-128": HeadDims(1, 192, 128, 64),
    "256": HeadDims(8, 256, 256, 64),
    "256-none": HeadDims(8, 256, 256, 0),
    "latent": HeadDims(32, 64, 512, 64, is_latent=True),
}
"""Heads of models that there are, by which layouts are tried."""


def layouts(dims: HeadDims, dtype: torch.dtype, chip: Chip, wanted: Sequence[int] = TILES) -> dict[Config, int]:
    """What may be chosen on a chip, with the largest tile of each; keys turned either way."""
    tiles = [tile for tile in wanted if tile <= most_rows(dims, dtype, chip.shared_bytes)]
    ways = [(turns_once, tile) for turns_once in (False, True)[: 1 + (dims.rotary_dim > 0)] for tile in tiles]
    return {config: tile for once, tile in ways for config in preferred(dims, dtype, tile, once, chip)}
