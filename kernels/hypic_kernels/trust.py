"""Whether a kernel may be trusted where it runs: a small random problem against its reference, once per variant.

Compilers have miscompiled matrix products for single chips and versions before. A wrong state is silent; some
milliseconds at first use buy that none is ever used.
"""

from __future__ import annotations

import functools
import math
import subprocess
import warnings
from typing import Protocol

import torch
from torch import Tensor


class Variant(Protocol):
    """What decides which machine code runs; a frozen dataclass, so that equal ones are checked once."""

    @property
    def tolerance(self) -> float:
        """Of the relative error."""
        ...

    def __hash__(self) -> int: ...

    def measure(self) -> float:
        """The kernel's relative error on a random problem."""
        ...


@functools.cache
def is_trusted(variant: Variant, instead: str = "The slower reference is.") -> bool:
    """Runs the check at the first call for a variant, and warns once where it fails, saying what is done ``instead``.

    It waits for the device, so a variant must have been used once before a graph is captured.
    """
    reason = _fault(variant)
    if reason is None:
        return True
    warnings.warn(f"{variant} is not used: {reason}. {instead}", RuntimeWarning, stacklevel=2)
    return False


def _fault(variant: Variant) -> str | None:
    """What is wrong with the kernel, or None."""
    from triton.errors import TritonError

    try:
        error = variant.measure()
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        # It cannot be built or loaded here: too little shared memory, say, or no C compiler for its launcher.
        return f"it does not run ({type(fault).__name__}: {fault})"
    if error <= variant.tolerance:
        return None
    return f"its relative error is {error:.1e}, and {variant.tolerance:.0e} is allowed"


def relative_error(result: Tensor, exact: Tensor) -> float:
    """``|result - exact| / |exact|``, infinite unless NaN stands in exactly the same places."""
    known = ~exact.isnan()
    if bool((result.isnan() == known).any()):
        return math.inf
    difference = torch.where(known, result.to(exact.dtype) - exact, 0.0)
    scale = torch.where(known, exact, 0.0).norm()
    return float(difference.norm() / scale.clamp_min(torch.finfo(exact.dtype).tiny))
