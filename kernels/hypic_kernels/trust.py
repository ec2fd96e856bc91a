"""Whether a kernel may be trusted where it runs: a small random problem against its reference, once per variant.

Compilers have miscompiled matrix products for single chips and versions before. A wrong state is silent; some
milliseconds at first use buy that none is ever used.
"""

from __future__ import annotations

import functools
import math
import subprocess
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hypic_kernels import interpreted

RUNS = 3
# What CUDA says when nothing more can run in the process: not that a kernel does not fit.
LOST = (
    *("illegal memory access", "misaligned address", "illegal address", "illegal instruction"),
    *("unspecified launch failure", "device-side assert"),
)


class LostDeviceError(RuntimeError):
    """A kernel made the device unusable for this process; no reference can stand in for it."""


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
    reason = fault_of(variant.measure, variant.tolerance)
    if reason is None:
        return True
    warnings.warn(f"{variant} is not used: {reason}. {instead}", RuntimeWarning, stacklevel=2)
    return False


def fault_of(measure: Callable[[], float], tolerance: float) -> str | None:
    """What is wrong with a kernel whose error is measured, or None.

    Compiled kernels are measured several times: programs that race for a place are right most of the time.

    Raises:
        LostDeviceError: the kernel broke the process's context on the device.
        torch.OutOfMemoryError: the check itself found no memory, which says nothing of the kernel; the next use asks
            again.
    """
    from triton.errors import TritonError

    try:
        errors = [measure() for _ in range(1 if interpreted() else RUNS)]
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        if any(words in str(fault) for words in LOST):
            raise LostDeviceError(_lost(fault)) from fault
        # It cannot be built or loaded here: too little shared memory, say, or no C compiler for its launcher.
        return f"it does not run ({type(fault).__name__}: {fault})"
    wrong = [error for error in errors if not error <= tolerance]
    return f"its relative error is {wrong[0]:.1e}, and {tolerance:.0e} is allowed" if wrong else None


def _lost(fault: Exception) -> str:
    reason = str(fault).partition("\n")[0]
    return (
        f"a kernel broke this process's use of the GPU while it was checked ({reason}), and nothing can run there any"
        " more; start a new process, with kernels='off' if it happens again."
    )


def settle(device: torch.device) -> None:
    """Waits until matrices are written: a kernel that starts early (``early.py``) asks for them before it waits."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """``|result - exact| / |exact|``, infinite unless NaN stands in exactly the same places."""
    known = ~exact.isnan()
    if bool((result.isnan() == known).any()):
        return math.inf
    difference = torch.where(known, result.to(exact.dtype) - exact, 0.0)
    scale = torch.where(known, exact, 0.0).norm()
    return float(difference.norm() / scale.clamp_min(torch.finfo(exact.dtype).tiny))
