"""Sizes of the experts' products: what a program takes at once, by how many rows an expert gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["silu", "relu2", "none"]
"""What is done to a product before it is written: gated by silu, squared behind a relu, or nothing."""
MOST_ROWS_PER_EXPERT = 32
MANY_ROWS_PER_EXPERT = 256
LARGE_BYTES = 227 << 10
"""Shared memory of a program, from which on there is room for large blocks."""


class Config(NamedTuple):
    """``block_m`` rows, ``block_n`` columns of the result (a gated product reads two matrices of as many), ``block_k``
    of the sum at once, in 16-bit numbers; ``num_stages`` of it on their way."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int

    @property
    def blocks(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "STAGES": self.num_stages,
        }  # fmt: skip


class Layout(NamedTuple):
    """``by_row``: a program for each row and block of columns, rather than for each expert; the first row of an expert
    does the work of all its rows."""

    config: Config
    by_row: bool


def fits(num_rows: int, num_experts: int) -> bool:
    """Whether experts get so few rows that reading their matrices is all the work; more are for other products."""
    return num_rows <= MOST_ROWS_PER_EXPERT * num_experts


def is_many(num_rows: int, num_experts: int, kind: Kind, dtype: torch.dtype, room: int) -> bool:
    """Whether a product of many rows is as fast here as torch's grouped one, or faster: without an activation, in
    16-bit numbers, where a program may take ``room`` bytes of shared memory."""
    is_large = num_rows >= MANY_ROWS_PER_EXPERT * num_experts
    return is_large and kind == "none" and dtype.itemsize == 2 and room >= LARGE_BYTES


def choose(num_rows: int, num_experts: int, kind: Kind, dtype: torch.dtype, room: int = 0) -> Layout:
    """From shapes alone, so that a captured graph can be replayed whatever the router says; ``room`` as above."""
    if is_many(num_rows, num_experts, kind, dtype, room):
        return LARGE
    by_row = num_rows < num_experts
    mean = 1 if by_row else num_rows / num_experts
    block_m = 16 if mean <= 8 else 32 if mean <= 16 else 64
    block_n = 32 if kind == "silu" else 64
    if num_rows <= 32 and by_row and kind != "silu":
        block_n = 32  # Of few rows, narrow blocks: there must be more programs than multiprocessors.
    block_k, num_stages = (64, 4) if block_m == 64 else (128, 4)
    if 4 < mean <= 8 and kind != "silu":
        block_k, num_stages = 64, 6
    return Layout(Config(block_m, block_n, of_type(block_k, dtype), num_stages, 4), by_row)


LARGE = Layout(Config(128, 256, 64, 4, 8), False)


def of_type(block_k: int, dtype: torch.dtype) -> int:
    """As many bytes in wider numbers."""
    return block_k * 2 // dtype.itemsize


def layouts(kind: Kind, dtype: torch.dtype) -> list[Layout]:
    """All that ``choose`` may choose."""
    few = [(1, 256), (128, 256)]
    found = [choose(*sizes, kind, dtype) for sizes in [*few, (1, 1), (8, 1), (16, 1), (32, 1)]]
    return list(dict.fromkeys(found))


class Shared(NamedTuple):
    """The expert that every token meets: ``down(silu(gate(x)) * up(x))`` or ``down(relu(up(x))^2)``, times the sigmoid
    of ``x . gate`` if there is a gate.

    ``first [S, D]`` is the matrix of ``silu``, and the same as ``up [S, D]`` where there is none; ``down [D, S]``,
    ``gate [D]``.
    """

    first: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None


class Few(NamedTuple):
    """Sizes of a product of single tokens: ``block_n`` columns of the result a program, ``block_k`` of the sum at once,
    in 16-bit numbers, and of the product back ``group`` experts at once. ``early``: see ``early.py``."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group: int = 1
    early: bool = False


FEW: Sequence[tuple[int, Few, Few]] = (
    (1, Few(2, 1024, 1, 2, early=True), Few(2, 512, 1, 2, early=True)),
    (8, Few(8, 512, 1, 4, early=True), Few(2, 512, 1, 2, early=True)),
)
"""Up to how many tokens which sizes are taken, of the products in and back; of more tokens experts have rows in common,
and the products of ``choose`` are better."""


def is_few(num_tokens: int) -> bool:
    """Whether tokens are so few that products of single ones are the better way."""
    return num_tokens <= FEW[-1][0]


def choose_few(num_tokens: int, dtype: torch.dtype) -> tuple[Few, Few]:
    """Sizes of both products, in and back."""
    found = next((sizes for sizes in FEW if num_tokens <= sizes[0]), FEW[-1])
    return few_of_type(found[1], dtype), few_of_type(found[2], dtype)


def few_of_type(sizes: Few, dtype: torch.dtype) -> Few:
    return sizes._replace(block_k=of_type(sizes.block_k, dtype))
