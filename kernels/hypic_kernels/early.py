"""Kernels that start before the one before them has ended (programmatic dependent launch, compute capability 9.0 up).

Such a kernel has a constant ``EARLY``; its launch says so to the driver. It lets the next kernel start with
``let_next_start`` and waits with ``wait_for_last`` before it reads anything that an earlier kernel wrote, or writes
anything. Every program must wait: what is before the last kernel has ended because that one waited too. Before the wait
it may do what depends on nobody, as asking for a weight. Where Triton is too old for this, nothing starts early.
"""

# No postponed annotations: Triton reads this module's functions.
import functools
from typing import Any

import torch

from hypic_kernels.launch import jit

CAPABILITY = (9, 0)

let_next_start: Any
wait_for_last: Any
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    IS_KNOWN = False

    @jit
    def _nothing() -> None:
        pass

    let_next_start = wait_for_last = _nothing
else:
    IS_KNOWN = True
    let_next_start, wait_for_last = gdc_launch_dependents, gdc_wait


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether a kernel with ``EARLY`` runs on the device."""
    return IS_KNOWN and device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
