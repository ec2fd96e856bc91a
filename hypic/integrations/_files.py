"""Texts of files below one folder, read again only when they may have changed.

A file's signature (times, size, inode) is a short cut; what counts is its text. A file that was written so shortly
before it was read that a second write could leave the same signature is read again next time, as git does with
entries that are "racily clean". Text is canonical: UTF-8 without a byte order mark, line feeds only, no outer white
space. A link that leaves the folder, a file that is too large, and one that is not text are refused and reported.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("hypic")
MAX_FILE_BYTES = 1 << 20
# The coarsest clock of a file system in use, FAT's.
_GRAIN_NS = 2_000_000_000
_FENCED_OR_COMMENT = re.compile(r"(^(```|~~~).*?(?:^\2|\Z))|<!--.*?-->[ \t]*\n?", re.DOTALL | re.MULTILINE)

Signature = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class _Read:
    """What a file held when it was read last; ``is_certain`` unless a later write may have gone unseen."""

    signature: Signature
    text: str
    is_certain: bool


class Files:
    """Reads files below ``root``; ``refused`` tells which were not, and why."""

    def __init__(self, root: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.root, self.max_file_bytes = root, max_file_bytes
        self.refused: dict[str, str] = {}
        self._read: dict[Path, _Read] = {}

    def text(self, path: Path) -> str | None:
        """A file's canonical text; ``None`` when there is none or it is refused."""
        try:
            text = self._text(path)
        except FileNotFoundError:
            text = None
        except (OSError, RuntimeError, ValueError) as error:
            self._refuse(path, f"it cannot be read: {error}")
            text = None
        else:
            self.refused.pop(str(path), None)
        if text is None:
            self._read.pop(path, None)
        return text

    def below(self, folder: Path, suffixes: Collection[str]) -> Iterator[Path]:
        """Files with one of these suffixes in a folder and the folders in it, by name; hidden ones are left out."""
        for where, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if not name.startswith(".") and Path(name).suffix.lower() in suffixes:
                    yield Path(where, name)

    def _text(self, path: Path) -> str:
        real = path.resolve(strict=True)
        if not real.is_relative_to(self.root.resolve()):
            raise ValueError(f"it is a link that leaves {self.root}")
        known = self._read.get(path)
        if known is not None and known.is_certain and known.signature == _signature(real.stat()):
            return known.text
        started_ns = time.time_ns()
        if not stat.S_ISREG(real.stat().st_mode):
            raise ValueError("it is no regular file")
        with real.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(self.max_file_bytes + 1)
        if len(content) > self.max_file_bytes:
            raise ValueError(f"it has {status.st_size} bytes, and at most {self.max_file_bytes} are read")
        text = canonical(content)
        self._read[path] = _Read(_signature(status), text, status.st_mtime_ns < started_ns - _GRAIN_NS)
        return text

    def _refuse(self, path: Path, reason: str) -> None:
        if self.refused.get(str(path)) != reason:
            logger.warning("%s is left out: %s", path, reason)
        self.refused[str(path)] = reason


def canonical(content: bytes) -> str:
    """Text as it enters a segment.

    Raises:
        UnicodeDecodeError: not UTF-8.
    """
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").strip()


def without_comments(text: str) -> str:
    """Markdown without its ``<!-- -->`` comments; those in fenced code stay."""
    return _FENCED_OR_COMMENT.sub(lambda match: match[1] or "", text).strip()


def _signature(status: os.stat_result) -> Signature:
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev)
