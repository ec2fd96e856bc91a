"""How maps lie in memory and how the kernel is laid out on the chip; plain numbers, so that Triton is not needed."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from torch import Tensor

Kind = Literal["head", "diagonal", "dense"]
Precision = Literal["ieee", "tf32x3"]

KINDS: tuple[Kind, ...] = ("head", "diagonal", "dense")
SMALLEST_TILE = 16
"""The least extent of a matrix product's operands."""
RESERVED_BYTES = 2048
"""Of shared memory, for what is not counted one by one."""


class LayoutError(ValueError):
    """A tensor whose rows the kernel cannot address."""


def kind_of(transition: Tensor) -> Kind:
    """Of ``T [M, H]``, ``[M, H, K]`` or ``[M, H, K, K]``."""
    return KINDS[transition.ndim - 2]


def padded(size: int) -> int:
    """The power of two that a tile of ``size`` rows or columns takes."""
    return max(SMALLEST_TILE, 1 << (size - 1).bit_length())


def pitch_of(tensor: Tensor) -> int:
    """Numbers from one row to the next: rows are the last axis, of ``[M, H]`` every single number.

    Raises:
        LayoutError: rows are not evenly spaced, or a row's numbers do not stand side by side.
    """
    if tensor.is_contiguous():
        return tensor.shape[-1] if tensor.ndim > 2 else 1
    if tensor.ndim > 2:
        width, inner, axes = tensor.shape[-1], tensor.stride(-1), range(tensor.ndim - 2, -1, -1)
    else:
        width, inner, axes = 1, 1, range(tensor.ndim - 1, -1, -1)
    pitch = next((tensor.stride(axis) for axis in axes if tensor.shape[axis] > 1), width)
    expected, is_even = pitch, inner == 1 or width == 1
    for axis in axes:
        is_even = is_even and (tensor.shape[axis] == 1 or tensor.stride(axis) == expected)
        expected *= tensor.shape[axis]
    if not is_even and tensor.numel():
        raise LayoutError(
            f"a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())} has no evenly spaced rows; "
            "call .contiguous() on it first."
        )
    return pitch


class Config(NamedTuple):
    """How the kernel is laid out on the chip.

    ``block_v`` columns of the state per program. ``num_stages``: 1 loads a map when it is needed, 3 while the one
    before it is applied, 5 two maps ahead (a map's address is itself loaded, which takes every second stage).
    ``num_slices`` cuts a dense product along its inner axis, which bounds the registers that operands take.
    ``block_k`` rows of the state per program, for transitions that are not dense.
    """

    block_v: int
    num_warps: int
    num_stages: int
    num_slices: int = 1
    block_k: int = 32

    def fits(self, key_dim: int, value_dim: int) -> bool:
        """Whether slices are wide enough to multiply, and no program holds nothing but padding."""
        return padded(key_dim) // self.num_slices >= SMALLEST_TILE and self.block_v <= padded(value_dim)

    def shared_bytes(self, key_dim: int, map_bytes: int) -> int:
        """Shared memory of the kernel for dense transitions, as read off compiled ones.

        ``map_bytes`` per number of a map: 4 for float32, 6 where sources are float32 and bfloat16.
        """
        rows, num_buffers = padded(key_dim), self.num_stages // 2
        maps = num_buffers * rows * (rows + self.block_v) * map_bytes
        return maps + rows * self.block_v * 4 + RESERVED_BYTES


@functools.cache
def default_config(
    kind: Kind, key_dim: int, value_dim: int, precision: Precision, map_bytes: int, shared_bytes: int
) -> Config:
    """The layout that is used unless a caller names one: as many maps ahead as ``shared_bytes`` hold."""
    block_v, rows = min(32, padded(value_dim)), padded(key_dim)
    if kind != "dense":
        return Config(block_v, num_warps=4, num_stages=3)
    num_slices = _num_slices(key_dim, precision)
    ahead = [Config(block_v, 8 if rows > 64 else 4, stages, num_slices) for stages in (5, 3, 1)]
    return next((c for c in ahead if c.shared_bytes(key_dim, map_bytes) <= shared_bytes), ahead[-1])


def _num_slices(key_dim: int, precision: Precision) -> int:
    """Exact products hold both operands in registers, so they need narrow slices; matrix units need wide ones."""
    return max(1, padded(key_dim) // (64 if precision == "tf32x3" else 16))


def candidates(kind: Kind, key_dim: int, value_dim: int, precision: Precision) -> list[Config]:
    """Layouts worth measuring for float32 maps; every one of them is tested."""
    if kind != "dense":
        parts = ((32, 32, 4), (32, 128, 4), (64, 32, 4), (128, 16, 4), (32, 16, 2), (64, 64, 8))
        found = [Config(v, w, s, block_k=k) for v, k, w in parts for s in (3, 5)]
    else:
        shapes, num_slices = ((16, 4), (16, 8), (32, 8), (64, 8)), _num_slices(key_dim, precision)
        found = [Config(v, w, s, num_slices) for v, w in shapes for s in (3, 5)]
    return [config for config in found if config.fits(key_dim, value_dim)]
