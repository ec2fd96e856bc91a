"""What each of several workers gets of a machine: a device, a part of its memory, threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.errors import ConfigError

# The token budget of a step, and on a GPU with so many bytes: below it launches take longer than what is launched.
STEP_TOKENS, LARGE_STEP_TOKENS, LARGE_GPU_BYTES = 8192, 16_384, 40_000_000_000


def own_share(config: EngineConfig) -> EngineConfig:
    """The settings of one worker of several: its threads and, where several share a device, its part of the memory.

    Raises:
        ConfigError: a device with a number is named for several workers.
    """
    if config.workers == 1:
        return config
    is_cuda, num_gpus = _gpus(config)
    if is_cuda and ":" in config.device:
        raise ConfigError(
            f"device is {config.device!r} and workers is {config.workers}; for several pass device='cuda'."
        )
    sharing = -(-config.workers // num_gpus) if is_cuda else config.workers
    memory = config.memory / sharing if isinstance(config.memory, float) else config.memory
    threads = config.threads
    if threads is None and not is_cuda:
        threads = max(1, (os.cpu_count() or 1) // config.workers)
    return replace(config, memory=memory, threads=threads)


def device_for(rank: int, config: EngineConfig) -> str:
    """The device of a worker: GPUs in turn, or the CPU."""
    is_cuda, num_gpus = _gpus(config)
    return f"cuda:{rank % num_gpus}" if is_cuda and config.workers > 1 else config.device


def environment_of(rank: int, config: EngineConfig) -> Mapping[str, str]:
    """What a worker's process finds in its environment: it sees one GPU, so that every thread of it uses that one."""
    is_cuda, _ = _gpus(config)
    if not is_cuda:
        return {}
    device = torch.device(device_for(rank, config))
    return {"CUDA_VISIBLE_DEVICES": f"GPU-{torch.cuda.get_device_properties(device).uuid}"}


def _gpus(config: EngineConfig) -> tuple[bool, int]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return num_gpus > 0 and config.device != "cpu", max(num_gpus, 1)


def settings_of(rank: int, config: EngineConfig) -> Mapping[str, Any]:
    """The settings of one worker's process, as plain values."""
    device = device_for(rank, config).partition(":")[0]
    return {**asdict(own_share(config)), "device": device, "workers": 1}


def step_tokens(config: EngineConfig, device: torch.device) -> int:
    """The token budget of one step on a device."""
    if config.max_step_tokens is not None:
        return config.max_step_tokens
    is_large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return LARGE_STEP_TOKENS if is_large else STEP_TOKENS
