"""Files of skills and memory for tests, and what a source says of them."""

from __future__ import annotations

import os
from pathlib import Path

from hypic.integrations.agents import (
    SegmentSource,
)

LONG_AGO_S = 1_000_000_000


def put(path: Path, text: str | bytes, *, age_s: int = 100) -> Path:
    """Writes a file and dates it, each time differently, so that it is not racily clean."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    os.utime(path, (LONG_AGO_S + age_s, LONG_AGO_S + age_s))
    return path


def skill(folder: Path, name: str, body: str, description: str = "Does it.", age_s: int = 100) -> Path:
    text = f"---\nname: {name}\ndescription: {description}\n---\n\n{body}\n"
    return put(folder / name / "SKILL.md", text, age_s=age_s)


def events(source: SegmentSource) -> list[tuple[str, str | None]]:
    return [(event.kind, event.name) for event in source.poll()]


def cached(source: SegmentSource) -> list[tuple[str | None, str]]:
    return [(one.name, one.text) for one in source.segments() if one.cache is not False]


def live(source: SegmentSource) -> list[str]:
    return [one.text for one in source.segments() if one.cache is False]
