"""How much memory a device has left, and whether a fault is for lack of it, in whichever words it comes.

torch's own allocator says so by the class of its error. Libraries below it take memory of their own beside torch's: a
kernel that is loaded for the first time, the work space of a product or of an attention. Some of these say what they
lacked, and some only that they failed: those are believed while the device is short of memory, and not else. What is
done about it is for who asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

logger = logging.getLogger("hypic")
T = TypeVar("T")
# Of drivers, libraries, Triton, and torch's allocator of a CPU.
SAID = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
# What a failed attention of cuDNN, or a handle that could not be made, leaves open.
UNSAID = (
    "mha_graph",
    "cuDNN Frontend error",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_EXECUTION_FAILED",
)
# A device with less than this beside all that torch holds is short: libraries load kernels by hundreds of megabytes.
SHORT_BYTES = 2**30


def is_out_of_memory(fault: BaseException, device: torch.device) -> bool:
    """Whether ``fault``, raised by something that ran on ``device``, is for lack of memory."""
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(fault, RuntimeError):
        return False
    words = str(fault)
    return any(said in words for said in SAID) or (any(one in words for one in UNSAID) and _is_short(device))


def attempted(run: Callable[[], T], device: torch.device, what: str = "a step") -> T | None:
    """What ``run`` gives; ``None`` if the device has too little memory for it, and what it took is free again then."""
    try:
        return run()
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault, device):
            raise
        logger.warning("%s ran out of memory: %s", what, fault)
        return None


def _is_short(device: torch.device) -> bool:
    """Whether a GPU has little left that nobody holds, torch included: libraries have no use for what torch keeps."""
    if device.type != "cuda":
        return False
    try:
        return torch.cuda.mem_get_info(device)[0] < SHORT_BYTES
    except RuntimeError:  # a device whose memory was written where it must not be answers nothing any more
        return False


def shortage(device: torch.device, pool_bytes: int) -> str:
    """A step that there is no memory for beside a pool: how much there is, and the way out."""
    return (
        f"{device} ran out of memory in a step: the pool holds {pool_bytes // 2**20:,} MiB and "
        f"{free_bytes(device) // 2**20:,} MiB are free; lower memory= to leave room for activations, or "
        "max_step_tokens= to need less."
    )


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, with what torch keeps of it for itself, or of the machine for the CPU."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    available = _meminfo("MemAvailable")
    return available if available is not None else 4 * 2**30


def _meminfo(name: str) -> int | None:
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == f"{name}:"), None)
