"""A few exam items in one small file, so that a test can ask them without the training text."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hypic_apps.train.exam import Item


def write(items: Sequence[Item], path: Path) -> int:
    """Writes the items as compressed JSON; returns the file's bytes."""
    rows = "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)
    return path.write_bytes(lzma.compress(rows.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> list[Item]:
    """The items of a file that ``write`` wrote."""
    rows = map(json.loads, lzma.decompress(path.read_bytes()).decode().splitlines())
    return [Item(tuple(row["passages"]), row["question"], row["answer"]) for row in rows]
