"""How this package's kernels are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, typed whether or not a type checker can see Triton. One kernel serves any number of chains."""
    return triton.jit(function, do_not_specialize=["num_chains", "num_keys"])
