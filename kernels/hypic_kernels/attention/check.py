"""Whether the kernel may be trusted where it runs: small random problems against the reference, once per variant.

Compilers have miscompiled matrix products for single chips and versions before; wrong attention is silent, and some
milliseconds at first use buy that none is ever used.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from typing import NamedTuple

import torch

from hypic_kernels.attention.layout import Config, HeadDims
from hypic_kernels.attention.problem import Problem, Work, relative_error

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of ``relative_error``, by the type that keys are stored in. What is right stays some three times below."""

WORK = (Work.last(331, 37), Work(150, ((0, 9), (90, 8), (140, 10))), Work(0, ()), Work.last(64, 1))
"""Whole blocks of keys and broken ones, rows within a chain and at its end, and nothing."""


class Variant(NamedTuple):
    """What decides which machine code runs."""

    device: torch.device
    dims: HeadDims
    num_key_heads: int
    dtype: torch.dtype
    query_dtype: torch.dtype
    out_dtype: torch.dtype
    tile: int
    is_split: bool
    is_moved: bool
    config: Config


@functools.cache
def is_trusted(variant: Variant) -> bool:
    """Runs the check at the first call for a variant, and warns once where it fails.

    It waits for the device, so a variant must have been used once before a graph is captured.
    """
    reason = _fault(variant)
    if reason is None:
        return True
    warnings.warn(
        f"the attention kernel is not used on {variant.device} for heads of {variant.dims.key_dim} and "
        f"{variant.dims.value_dim} channels in {variant.dtype}: {reason}. The reference is used instead, which is "
        "much slower.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _fault(variant: Variant) -> str | None:
    """What is wrong with the kernel, or None."""
    from triton.errors import TritonError

    try:
        error = measure(variant)
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        # It cannot be built or loaded here: too little shared memory, say, or no C compiler for its launcher.
        return f"it does not run ({type(fault).__name__}: {fault})"
    allowed = TOLERANCES[variant.dtype]
    return None if error <= allowed else f"its relative error is {error:.1e}, and {allowed:.0e} is allowed"


def measure(variant: Variant) -> float:
    """The kernel's relative error on a random problem."""
    problem = Problem.random(
        variant.dims,
        WORK,
        num_key_heads=variant.num_key_heads,
        dtype=variant.dtype,
        query_dtype=variant.query_dtype,
        tile=variant.tile,
        num_splits=3 if variant.is_split else 1,
        is_moved=variant.is_moved,
        spare=2,
        device=variant.device,
    )
    return relative_error(problem.run(variant.config, variant.out_dtype), problem.solve())
