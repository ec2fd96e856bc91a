"""How the kernels of this package are laid out on the chip; plain numbers, so that Triton is not needed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hypic_kernels.delta.rule import Precision

CHUNK_SIZES = (16, 32, 64)
SMALLEST_TILE = 16
"""The least extent of a matrix product's operands."""


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
    """Maps leave in blocks of ``rows`` x ``columns``; ``num_stages`` of loads in flight in each loop."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


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


def default_precision(dtype: torch.dtype) -> Precision:
    """For q, k, v of a type: as exact as fp32 arithmetic, in the fewest products on matrix units."""
    return "bf16x3" if dtype == torch.bfloat16 else "tf32x3"


def lift_candidates(size: int, key_dim: int, value_dim: int) -> list[LiftConfig]:
    """Layouts worth measuring, the default first; every one of them is tested."""
    block, small = _block(64, key_dim, value_dim), _block(32, key_dim, value_dim)
    shapes = [(block, block, 4, 1), (block, small, 4, 1), (block, block, 8, 1), (block, block, 4, 2)]
    return list(dict.fromkeys(LiftConfig(*shape) for shape in shapes))


def lift_config(size: int, key_dim: int, value_dim: int) -> LiftConfig:
    return lift_candidates(size, key_dim, value_dim)[0]


def read_candidates(size: int, key_dim: int, value_dim: int, has_norm: bool) -> list[ReadConfig]:
    """As ``lift_candidates``."""
    whole, block_k = padded(value_dim), _block(32, key_dim)
    widths = [whole] if has_norm else sorted({whole, min(64, whole)})
    num_warps = 8 if size * whole > 64 * 64 else 4
    found = [ReadConfig(block_k, width, num_warps, stages) for width in widths for stages in (2, 3, 1)]
    found += [ReadConfig(max(16, block_k // 2), width, num_warps, 3) for width in widths]
    found += [ReadConfig(block_k, width, 12 - num_warps, 2) for width in widths]
    return list(dict.fromkeys(found))


def read_config(size: int, key_dim: int, value_dim: int, has_norm: bool) -> ReadConfig:
    return read_candidates(size, key_dim, value_dim, has_norm)[0]


def step_candidates(key_dim: int, value_dim: int) -> list[StepConfig]:
    """As ``lift_candidates``: a block of the state takes at most 128 x 128 numbers of registers."""
    rows, whole = padded(key_dim), padded(value_dim)
    widest = min(whole, max(SMALLEST_TILE, 128 * 128 // rows))
    found = [StepConfig(widest, 8, 1), StepConfig(max(16, widest // 2), 4, 1), StepConfig(max(16, widest // 2), 8, 1)]
    found += [StepConfig(max(16, widest // 4), 4, stages) for stages in (1, 2)]
    return list(dict.fromkeys(found))


def step_config(key_dim: int, value_dim: int) -> StepConfig:
    return step_candidates(key_dim, value_dim)[0]
