"""Which twin a call takes."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


def takes_kernel(backend: Backend, dtype: torch.dtype, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the kernel is asked for, or ``auto`` may mean it: CUDA, types that it reads, no gradient."""
    if backend != "auto":
        return backend == "triton"
    if not tensors[0].is_cuda or dtype != torch.float32 or not available() or interpreted():
        return False
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and all(tensor.dtype in STORAGE for tensor in tensors)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take, as far as it bounds a kernel there."""
    if device.type != "cuda" or not available():
        return 1 << 30
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
