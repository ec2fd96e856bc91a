"""Files of the disk tier: what a directory holds, reading the beginning of an entry, writing one so that it lasts."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hypic.engine.store.header import About
from hypic.engine.store.header import read_about as about_in
from hypic.errors import StoreCorrupt

SUFFIX = ".safetensors"
BLOCK_BYTES = 4096
STRAY_S = 3600.0


@dataclass(frozen=True)
class File:
    """A file as the directory shows it; ``num_bytes`` in whole blocks."""

    path: str
    num_bytes: int
    used_s: float


def real_bytes(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def look_at(path: str) -> File | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return File(path, real_bytes(found.st_size), found.st_mtime)


def folders_in(root: Path) -> list[str]:
    with suppress(OSError), os.scandir(root) as items:
        return [item.path for item in items if item.is_dir(follow_symlinks=False)]
    return []


def files_in(folder: str) -> Iterator[File]:
    with suppress(OSError), os.scandir(folder) as items:
        for item in items:
            with suppress(OSError):
                if item.is_file(follow_symlinks=False):
                    found = item.stat(follow_symlinks=False)
                    yield File(item.path, real_bytes(found.st_size), found.st_mtime)


def key_of(path: str) -> bytes | None:
    name = os.path.basename(path).removesuffix(SUFFIX)
    try:
        return bytes.fromhex(name) if len(name) == 64 else None
    except ValueError:
        return None


def strays(root: Path) -> Iterator[str]:
    """Temporary files that nobody writes any more."""
    for folder in folders_in(root):
        for file in files_in(folder):
            name = os.path.basename(file.path)
            if name.startswith(".") and name.endswith(".tmp") and not _is_written(name, file.used_s):
                yield file.path


def _is_written(name: str, used_s: float) -> bool:
    """Whether the process that made a temporary file may still be at it; process ids of other machines say nothing."""
    parts = name.split(".")
    if time.time() - used_s > STRAY_S or len(parts) != 5 or not parts[2].isdigit():
        return False
    try:
        os.kill(int(parts[2]), 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def read_about(path: str) -> About:
    """A file's metadata, from as little of it as will do."""
    with open(path, "rb", buffering=0) as file:
        data = file.read(2048)
        while (about := about_in(data)) is None:
            more = file.read(len(data))
            if not more:
                raise StoreCorrupt(f"{os.path.basename(path)[:16]} ends in the middle of its header; it is cut short.")
            data += more
    return about


def mapped(path: str) -> Tensor:
    """A file's bytes without reading them; written to, pages are the process's own."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise StoreCorrupt(f"{os.path.basename(path)[:16]} is empty.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sync(folder: Path) -> None:
    """A rename lasts once its directory is on disk; where directories cannot be opened, the file system sees to it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unlinked(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
