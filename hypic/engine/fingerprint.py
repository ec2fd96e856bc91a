"""The fingerprint of a checkpoint: its content, never its path or its age.

SHA-256 over the configuration, the safetensors files' headers and each file's own SHA-256. A file in a Hub cache is a
link to a blob that is named by its SHA-256, which is taken as it stands; any other file is read once, and its digest is
remembered with all that tells whether it is still the same file: path, size, times of change, inode and device. What
is remembered lies in the user's cache folder, readable by its owner only; it saves time and is never needed.

Tokenizer files do not enter (token ids do, in every key), nor does the type that ``config.json`` declares: the type of
the loaded weights stands in the engine's identity by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypic.errors import CheckpointError

READ_BYTES = 1 << 22
LONGEST_HEADER_BYTES = 100_000_000
# A file that changed this recently could change again without its times showing it.
SETTLED_NS = 2_000_000_000
MOST_REMEMBERED = 4096
IRRELEVANT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


def fingerprint(config: Mapping[str, Any], parts: Sequence[bytes]) -> str:
    """SHA-256 over the configuration and the digests of what it describes, as hexadecimal text."""
    digest = hashlib.sha256(json.dumps(_relevant(config), sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def of_checkpoint(config: Mapping[str, Any], files: Sequence[Path]) -> str:
    """The fingerprint of a configuration and its safetensors files, whatever these are called.

    Raises:
        CheckpointError: a file cannot be read, is no safetensors file, or changes while it is read.
    """
    return fingerprint(config, sorted(_header_digest(path) + bytes.fromhex(file_digest(path)) for path in files))


def file_digest(path: Path) -> str:
    """A file's SHA-256 as hexadecimal text; it is read only if neither its blob's name nor the memory tells.

    Raises:
        CheckpointError: it cannot be read, or changes while it is read.
    """
    blob = _blob_name(path)
    if blob is not None:
        return blob
    memory, key = _memory_file(), str(path.resolve())
    state = _state(path)
    known = _remembered(memory).get(key)
    if known is not None and known[:-1] == state and re.fullmatch("[0-9a-f]{64}", str(known[-1])):
        return str(known[-1])
    digest = _read(path)
    if _state(path) != state:
        raise CheckpointError(f"{path} was changed while it was read; wait until it is whole and load it again.")
    if time.time_ns() - max(state[1], state[2]) > SETTLED_NS:
        _remember(memory, key, [*state, digest])
    return digest


def read_header(path: Path) -> bytes:
    """The JSON header of a safetensors file: 8 bytes with its length, then as many bytes.

    Raises:
        CheckpointError: the file cannot be read or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= LONGEST_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
    if not length or len(header) != length:
        raise CheckpointError(f"{path} is no safetensors file; download it again.")
    return header


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what loading does not read, in a multimodal model's text part as well."""
    kept = {name: value for name, value in config.items() if name not in IRRELEVANT}
    return {name: _relevant(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def _header_digest(path: Path) -> bytes:
    return hashlib.sha256(read_header(path)).digest()


def _blob_name(path: Path) -> str | None:
    """The SHA-256 that a link into a Hub cache's blobs carries as its target's name."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    is_blob = target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name) is not None
    return target.name if is_blob else None


def _state(path: Path) -> list[int]:
    """What changes with a file: size, times of change of content and of inode, inode, device."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _read(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
    return digest.hexdigest()


# -- what is remembered ----------------------------------------------------------------------------------------------


def _memory_file() -> Path:
    """``hypic/digests.json`` in the user's cache folder (the XDG base directory specification)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "hypic" / "digests.json"


def _remembered(memory: Path) -> dict[str, list[Any]]:
    """Digests by path; none where there is no such file, or one that others could have written."""
    try:
        if hasattr(os, "getuid") and (memory.stat().st_uid != os.getuid() or memory.stat().st_mode & 0o022):
            return {}
        found = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {path: entry for path, entry in found.items() if isinstance(entry, list) and len(entry) == 6}


def _remember(memory: Path, path: str, entry: list[Any]) -> None:
    """Adds a digest, by a file that takes the old one's place; where that is not allowed, nothing is remembered."""
    known = _remembered(memory)
    known.pop(path, None)
    known = dict(list(known.items())[1 - MOST_REMEMBERED :]) | {path: entry}
    with suppress(OSError):
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=memory.parent, prefix="digests-")  # 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(known, file)
            os.replace(name, memory)
        except OSError:
            os.unlink(name)
