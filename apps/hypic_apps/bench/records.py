"""Results: what they were measured on, how they are written, and how they are shown as text."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hypic import __version__
from hypic.engine.runner import device_of
from hypic_apps.cli.errors import CommandError
from hypic_apps.cli.hardware import hardware
from hypic_apps.cli.whole_file import write_whole

PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention", "numpy")
Rows = Sequence[Sequence[str]]


def about(what: str) -> dict[str, Any]:
    """Date, command, hardware and versions, to stand in front of results."""
    return {
        "what": what,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["hypic", "bench", *_arguments()]),
        "hardware": hardware(),
        "versions": {"hypic": __version__, **{name: found for name in PACKAGES if (found := installed(name))}},
    }


def device_of_settings(settings: Mapping[str, Any]) -> torch.device:
    """The device that engine settings name."""
    return device_of(settings.get("device", "auto"))


def installed(package: str) -> str | None:
    """A package's version, or nothing where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Writes one JSON object.

    Raises:
        CommandError: the file cannot be written.
    """
    write(path, as_json(result) + "\n")


def as_json(result: object) -> str:
    """JSON that every reader takes: it knows no infinity, so what is beyond measure is ``null``."""
    return json.dumps(_finite(result), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path, text: str) -> None:
    """Raises ``CommandError`` where the file cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror}); name another file.") from error


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the sorted values."""
    assert values, "a percentile of nothing"
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def table(heads: Sequence[str], rows: Rows) -> str:
    """Columns as wide as their texts, numbers to the right, without any library."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    left = [not any(_is_number(row[n]) for row in rows) for n in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(w) if at_left else cell.rjust(w)
                  for cell, w, at_left in zip(line, widths, left, strict=True)).rstrip()
        for line in lines
    )  # fmt: skip


def number(value: float | None, unit: str = "") -> str:
    """Three figures or so; a dash for what was not measured."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


def _arguments() -> list[str]:
    """What stands behind ``bench`` on the command line, or all of it."""
    given = sys.argv[1:]
    return given[1:] if given[:1] == ["bench"] else given
