"""Kernels for linear-attention states, each beside a slow and short reference that says what it computes.

One folder per operation: ``reference.py`` is the definition in plain torch, ``triton.py`` its fast twin, ``README.md``
the derivation. The package imports torch and Triton and nothing of hypic; Triton is imported only when a kernel is
asked for, so everything here also works without it, through the references.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch


def available() -> bool:
    """Whether kernels can run: Triton is installed, and there is a CUDA device or Triton's interpreter is on."""
    if find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or interpreted()


def interpreted() -> bool:
    """Whether kernels would run in Triton's interpreter (``TRITON_INTERPRET=1``): on any tensor, but very slowly."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
