"""How the kernels of this package are laid out on the chip; plain numbers, so that Triton is not needed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from hypic_kernels.delta.rule import Precision, ScanPrecision

CHUNK_SIZES = (16, 32, 64)
SMALLEST_TILE = 16
"""The least extent of a matrix product's operands."""


@functools.cache
def padded(size: int) -> int:
    """The power of two that a tile of ``size`` rows or columns takes."""
    return max(SMALLEST_TILE, 1 << (size - 1).bit_length())


def _block(largest: int, *sizes: int) -> int:
    """The largest power of two up to ``largest`` that pads none of the sizes more than a tile would: 96 takes 32."""
    block = largest
    while block > SMALLEST_TILE and any(-(-size // block) * block - size >= block // 2 for size in sizes):
        block //= 2
    return block


class LiftConfig(NamedTuple):
    """Maps leave in blocks of ``rows`` x ``columns``, by ``num_warps``; a chunk is solved by ``solve_warps``.

    Loops are not pipelined: with two stages the compiler (Triton 3.6, sm_90) let a tile be overwritten while a product
    still read it, and results were wrong by 1e-3.
    """

    rows: int
    columns: int
    num_warps: int
    solve_warps: int


class ReadConfig(NamedTuple):
    """``block_k`` rows of a state at a time, ``block_v`` of its columns per program (all of them with a norm)."""

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


class StepConfig(NamedTuple):
    """``block_v`` columns of a state at a time."""

    block_v: int
    num_warps: int
    num_stages: int


class CarryConfig(NamedTuple):
    """``block`` columns of a state or transition at a time; loads of ``num_stages`` chunks are under way."""

    block: int
    num_warps: int
    num_stages: int


@functools.cache
def carry_config(key_dim: int) -> CarryConfig:
    """As near to what fla's measurements chose for its walk as lets two programs run on a multiprocessor; wide heads
    have no room for a second stage on every chip. Not measured: ``bench`` times the others."""
    return CarryConfig(32, 4, 2 if key_dim <= 128 else 1)


def carry_candidates(key_dim: int, room: int) -> list[CarryConfig]:
    """Layouts to be measured that fit into ``room`` bytes of shared memory with bfloat16, the default first."""
    default = carry_config(key_dim)
    layouts = (CarryConfig(*sizes, stages) for sizes in ((32, 4), (32, 8), (64, 8), (128, 8)) for stages in (1, 2, 3))
    return [default, *(x for x in layouts if x != default and _carry_bytes(key_dim, x) <= room)]


def _carry_bytes(key_dim: int, config: CarryConfig) -> int:
    """At most: keys, ``w`` and values of every stage, a state as it is multiplied, and values on their way."""
    size, tokens = padded(key_dim), 64
    return 2 * (config.num_stages * tokens * (2 * size + config.block) + (size + tokens) * config.block) + 1024


def default_precision(dtype: torch.dtype) -> Precision:
    """For q, k, v of a type: as exact as fp32 arithmetic, in the fewest products on matrix units."""
    return "bf16x3" if dtype == torch.bfloat16 else "tf32x3"


def read_precision(dtype: torch.dtype) -> Precision:
    """For outputs of a type: where 8 bits are kept, 16 are enough."""
    return "bf16x3" if dtype == torch.bfloat16 else "tf32x3"


def solving_precision(dtype: torch.dtype, precision: ScanPrecision) -> Precision:
    """Of the products of ``lift``'s first launch before a scan."""
    return "ieee" if precision == "ieee" else default_precision(dtype)


def lift_candidates(size: int, key_dim: int, value_dim: int) -> list[LiftConfig]:
    """Layouts worth measuring, the default first; every one of them is tested."""
    block, warps = _block(64, key_dim, value_dim), 2 if size > 16 else 1
    tall = min(2 * block, padded(key_dim))
    shapes = [(block, block, 4, warps), (tall, block, 4, warps), (block, max(16, block // 2), 4, 2 * warps)]
    return list(dict.fromkeys(LiftConfig(*shape) for shape in shapes))


@functools.cache
def lift_config(size: int, key_dim: int, value_dim: int) -> LiftConfig:
    return lift_candidates(size, key_dim, value_dim)[0]


def read_candidates(size: int, key_dim: int, value_dim: int, has_norm: bool) -> list[ReadConfig]:
    """As ``lift_candidates``."""
    # Tiles of 64 x 16 are compiled to reads out of bounds by Triton 3.6 (see ``hypic_kernels.decay``).
    whole, block_k = max(padded(value_dim), 32 if size == 64 else 16), _block(32, key_dim)
    widths = [whole] if has_norm else sorted({whole, min(64, whole)})
    # Four warps as long as they hold the outputs: eight would share 64 rows, and move them to another layout and back.
    num_warps = 8 if size * whole > 64 * 128 else 4
    kinds = [(block_k, num_warps, 3), (16, num_warps, 4), (16, num_warps, 1), (16, 12 - num_warps, 2)]
    if size == 64:
        kinds[:2] = kinds[1::-1]
    return list(dict.fromkeys(ReadConfig(rows, width, *rest) for rows, *rest in kinds for width in widths))


@functools.cache
def read_config(size: int, key_dim: int, value_dim: int, has_norm: bool) -> ReadConfig:
    return read_candidates(size, key_dim, value_dim, has_norm)[0]


def step_candidates(key_dim: int, value_dim: int) -> list[StepConfig]:
    """As ``lift_candidates``: a block of the state takes at most 128 x 128 numbers of registers."""
    rows, whole = padded(key_dim), padded(value_dim)
    widest = min(whole, max(SMALLEST_TILE, 128 * 128 // rows))
    found = [StepConfig(widest, 8, 1), StepConfig(max(16, widest // 2), 4, 1), StepConfig(max(16, widest // 2), 8, 1)]
    found += [StepConfig(max(16, widest // 4), 4, stages) for stages in (1, 2)]
    return list(dict.fromkeys(found))


@functools.cache
def step_config(key_dim: int, value_dim: int) -> StepConfig:
    return step_candidates(key_dim, value_dim)[0]


class ScanConfig(NamedTuple):
    """``block_v`` columns of the state per program, by ``num_warps``."""

    block_v: int
    num_warps: int


SCAN_CHUNK_SIZES, LARGEST_SCAN_KEY = (16, 32), 128
"""What ``scan`` has a kernel for: rows that are short, and transitions that can wait in registers."""


def scan_precision(dtype: torch.dtype) -> ScanPrecision:
    """For tokens of a type."""
    return "bf16x3" if dtype == torch.bfloat16 else "bf16x6"


@functools.cache
def scan_fits(size: int, key_dim: int, config: ScanConfig, precision: ScanPrecision, room: int) -> bool:
    """Whether there is a kernel, and a program fits into ``room`` bytes of shared memory."""
    bytes_per_number = {"bf16x3": 4, "bf16x6": 6}.get(precision, 8)
    operands = padded(key_dim) * (padded(key_dim) + config.block_v) * bytes_per_number
    return size in SCAN_CHUNK_SIZES and key_dim <= LARGEST_SCAN_KEY and operands <= room


def scan_candidates(key_dim: int, value_dim: int) -> list[ScanConfig]:
    """As ``lift_candidates``."""
    width, warps = padded(value_dim), 8 if padded(key_dim) > 64 else 4
    return list(dict.fromkeys(ScanConfig(min(block, width), warps) for block in (32, 64, 16)))


@functools.cache
def scan_config(key_dim: int, value_dim: int) -> ScanConfig:
    return scan_candidates(key_dim, value_dim)[0]
