"""What a measurement ran on: processor, cores, threads and versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")


def hardware() -> dict[str, Any]:
    """Names and versions, as plain JSON values; ``gpu`` only where torch sees one."""
    import torch

    found = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {**found, "gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else found


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name as the system tells it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"
