"""Files that are written as a whole: whoever reads one, or ends this process meanwhile, never finds a part of it."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """The text beside the file, then in its place; folders on the way are made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
