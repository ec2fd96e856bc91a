"""The walk along chains of affine maps as one kernel: a program per chain, head and block of state columns.

Columns of ``S`` do not meet in ``T S + B``, so a program keeps its block ``[K, block_v]`` of the state on the chip from
the first map of its chain to the last, streams the transitions past it, and needs nobody else. What it computes stands
in ``reference.py``; why it is arranged so, in README.md. This file checks nothing: see ``compose`` in the package.
"""

# Annotations stay values here: Triton reads them.
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hypic_kernels.compose.chains import Chains


class Config(NamedTuple):
    """How a kernel is laid out. ``num_slices`` (1, 2 or 4) cuts a dense product along ``K``, which bounds registers."""

    block_v: int
    num_warps: int
    num_stages: int
    num_slices: int


def _jit(function: Callable[..., Any]) -> Any:
    """``triton.jit`` with a type, whether or not type checkers see Triton."""
    return triton.jit(function)


@_jit
def _source(first, second, pitch_first, pitch_second, is_second, index, head, H, ROWS: tl.constexpr):
    """Base address and row pitch of one head of one map, in whichever source it lies."""
    row = (index.to(tl.int64) * H + head) * ROWS
    pointer = tl.where(is_second, second + row * pitch_second, first + row * pitch_first)
    return pointer, tl.where(is_second, pitch_second, pitch_first)
