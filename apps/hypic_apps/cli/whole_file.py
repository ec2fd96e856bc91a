"""Files that are written as a whole: whoever reads one, or ends this process meanwhile, never finds a part of it.

A name that ends in ``.xz`` is that of a compressed file: tables of many records take a tenth of the room.
"""

from __future__ import annotations

import lzma
from pathlib import Path

COMPRESSED = ".xz"


def write_whole(path: Path, text: str) -> None:
    """The text beside the file, then in its place; folders on the way are made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, data = path.with_name(f".{path.name}.part"), text.encode()
    beside.write_bytes(lzma.compress(data) if path.suffix == COMPRESSED else data)
    beside.replace(path)


def read_whole(path: Path) -> str:
    """The text of a file that ``write_whole`` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8 text, or named as compressed and is not.
    """
    data = path.read_bytes()
    try:
        return (lzma.decompress(data) if path.suffix == COMPRESSED else data).decode()
    except lzma.LZMAError as error:
        raise ValueError(f"it is not compressed as its name says: {error}") from error
