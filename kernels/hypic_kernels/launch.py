"""What every kernel's launch needs: ``triton.jit`` with a type, the right current device, and an answer to "auto".

Triton is imported here, so only by modules that hold kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, with a type whether or not a type checker can see Triton."""
    return triton.jit(function)


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its arguments are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
