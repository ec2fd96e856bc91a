"""Where things are printed: results to stdout as plain text, everything else to stderr through rich."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def result(text: str = "", end: str = "\n") -> None:
    """Prints a result, at once."""
    print(text, end=end, flush=True)


def result_object(value: Mapping[str, Any]) -> None:
    """Prints one JSON object."""
    result(json.dumps(value, ensure_ascii=False, indent=2))


def notes() -> Console:
    """The console on stderr: no markup and no guessing of what should be coloured."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def progress(console: Console) -> Progress:
    """A bar that goes when it is done and is left out where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def working(console: Console, what: str) -> AbstractContextManager[object]:
    """Says what is being done for as long as it takes."""
    return console.status(what, spinner="line")
