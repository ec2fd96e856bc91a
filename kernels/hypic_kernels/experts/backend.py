"""Which twin a call takes, and what cannot be asked of either."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.trust import Variant, is_trusted

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


class ExpertsError(ValueError):
    """Tensors that do not fit each other."""


def takes_kernel(backend: Backend, tensors: tuple[Tensor, ...], variant: Variant) -> bool:
    """Whether the kernel is asked for, or ``auto`` may mean it and it is trusted."""
    if backend != "auto":
        return backend == "triton"
    return may_take_kernel(tensors) and is_trusted(variant)


def may_take_kernel(tensors: tuple[Tensor, ...]) -> bool:
    """CUDA, types that kernels read, no gradient."""
    if not tensors[0].is_cuda or not available() or interpreted():
        return False
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and all(tensor.dtype in STORAGE and tensor.stride(-1) == 1 for tensor in tensors)
