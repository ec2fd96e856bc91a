"""For which sizes products of few tokens are taken, and what a program takes at once: tables, no autotuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Sizes(NamedTuple):
    """``block_n`` columns of the result a program, ``block_k`` of the sum at once, in 16-bit numbers; a product behind
    a norm takes the whole sum at once. ``early``: see ``early.py``; the matrix is then asked for at once."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    early: bool = False


class Row(NamedTuple):
    """Up to ``most_tokens`` tokens and ``most_bytes`` of the matrix."""

    most_tokens: int
    most_bytes: int
    sizes: Sizes


PRODUCTS: Sequence[Row] = (Row(2, 24 << 20, Sizes(4, 1024, 1, 4, early=True)),)
"""Larger matrices are read at the memory's speed by the library's products too."""
NORMED: Sequence[Row] = (Row(8, 4 << 20, Sizes(2, 2048, 1, 4, early=True)),)
"""Every program norms the row itself, which is little beside a small matrix."""
MOST_NORMED_WIDTH = 8192


def choose(num_tokens: int, shape: Sequence[int], dtype: torch.dtype) -> Sizes | None:
    """For a matrix of a ``shape [M, K]``; ``None`` where another product is the better way."""
    return _choose(PRODUCTS, num_tokens, shape, dtype)


def choose_normed(num_tokens: int, shape: Sequence[int], dtype: torch.dtype) -> Sizes | None:
    """As ``choose``; rows wider than ``MOST_NORMED_WIDTH`` are never taken."""
    return None if shape[1] > MOST_NORMED_WIDTH else _choose(NORMED, num_tokens, shape, dtype)


def widest(table: Sequence[Row], dtype: torch.dtype) -> Sizes:
    """Sizes for what the table leaves to others."""
    return of_type(table[-1].sizes, dtype)


def _choose(table: Sequence[Row], num_tokens: int, shape: Sequence[int], dtype: torch.dtype) -> Sizes | None:
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    fitting = (row.sizes for row in table if num_tokens <= row.most_tokens and num_bytes <= row.most_bytes)
    found = next(fitting, None)
    return None if found is None else of_type(found, dtype)


def of_type(sizes: Sizes, dtype: torch.dtype) -> Sizes:
    """As many bytes in wider numbers."""
    return sizes._replace(block_k=sizes.block_k * 2 // dtype.itemsize)
