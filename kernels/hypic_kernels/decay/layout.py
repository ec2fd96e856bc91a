"""How the kernels of this package are laid out on the chip; plain numbers, so that Triton is not needed."""

from __future__ import annotations

import functools
from typing import NamedTuple

from hypic_kernels.delta.layout import CHUNK_SIZES, default_precision, padded

__all__ = [
    "CHUNK_SIZES",
    "LiftConfig",
    "ReadConfig",
    "StepConfig",
    "default_precision",
    "lift_candidates",
    "lift_config",
    "padded",
    "read_candidates",
    "read_config",
    "step_candidates",
    "step_config",
]


LEAST_COLUMNS = 32


class LiftConfig(NamedTuple):
    """``block_k`` rows of an end state at a time, ``block_v`` of its columns per program.

    Loops are not pipelined, as in ``hypic_kernels.delta``.
    """

    block_k: int
    block_v: int
    num_warps: int


class ReadConfig(NamedTuple):
    """``block_k`` rows of a state at a time, ``block_v`` of its columns per program."""

    block_k: int
    block_v: int
    num_warps: int


class StepConfig(NamedTuple):
    """``block_v`` columns of a state per program."""

    block_v: int
    num_warps: int


def _within(key_dim: int, value_dim: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Blocks of heads as small as these, but for 32 columns at least, some of which may be none: what Triton 3.6 makes
    of 64 x 16 for sm_90 reads where it must not. Eight warps only for 64 columns: fewer are filled by four."""
    block_k, block_v, num_warps = shape
    columns = min(block_v, max(LEAST_COLUMNS, padded(value_dim)))
    return min(block_k, padded(key_dim)), columns, num_warps if columns >= 64 else 4


def lift_candidates(size: int, key_dim: int, value_dim: int) -> list[LiftConfig]:
    """Layouts worth measuring, the default first; every one of them is tested."""
    shapes = [(64, 64, 4), (32, 128, 4), (64, 128, 8), (64, 32, 4), (32, 64, 4)]
    return list(dict.fromkeys(LiftConfig(*_within(key_dim, value_dim, shape)) for shape in shapes))


@functools.cache
def lift_config(size: int, key_dim: int, value_dim: int) -> LiftConfig:
    return lift_candidates(size, key_dim, value_dim)[0]


def read_candidates(size: int, key_dim: int, value_dim: int) -> list[ReadConfig]:
    """As ``lift_candidates``."""
    # Chunks of 64 hold scores and outputs of 64 x 64: four warps spill out of registers.
    shapes = [(32, 64, 4 if size == 16 else 8), (64, 64, 4), (32, 128, 8), (64, 128, 8), (32, 32, 4)]
    return list(dict.fromkeys(ReadConfig(*_within(key_dim, value_dim, shape)) for shape in shapes))


@functools.cache
def read_config(size: int, key_dim: int, value_dim: int) -> ReadConfig:
    return read_candidates(size, key_dim, value_dim)[0]


def step_candidates(key_dim: int, value_dim: int) -> list[StepConfig]:
    """As ``lift_candidates``."""
    whole = padded(value_dim)
    return list(dict.fromkeys(StepConfig(min(v, whole), warps) for v, warps in ((32, 4), (16, 4), (64, 8))))


@functools.cache
def step_config(key_dim: int, value_dim: int) -> StepConfig:
    return step_candidates(key_dim, value_dim)[0]
