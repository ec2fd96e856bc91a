"""Kernels for linear-attention states, each beside a slow and short reference that says what it computes.

One folder per operation: ``reference.py`` is the definition in plain torch, ``triton.py`` its fast twin, ``README.md``
the derivation. The package imports torch and Triton and nothing of hypic; Triton is imported only when a kernel is
asked for, so everything here also works without it, through the references.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

# Older chips have no products of bfloat16 on matrix units.
LEAST_CAPABILITY = (8, 0)


def available() -> bool:
    """Whether kernels can run here: in Triton's interpreter if it is on, else where nothing is ``missing``."""
    return interpreted() or missing() is None


@functools.cache
def missing() -> str | None:
    """What kernels lack to run on this machine's current GPU, as half a sentence; asked once."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        return "they are written for NVIDIA's GPUs, and torch was built for AMD's"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and 8.0 is needed"
    return None


@functools.cache
def interpreted() -> bool:
    """Whether kernels would run in Triton's interpreter (``TRITON_INTERPRET=1``): on any tensor, but very slowly.

    Asked once: Triton decides when it is imported.
    """
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
