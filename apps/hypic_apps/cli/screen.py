"""Where things are printed: results to stdout as plain text, everything else to stderr through rich."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

GAP = "  "
MIN_FLEXIBLE = 12
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def result(text: str = "", end: str = "\n") -> None:
    """Prints a result, at once, without the control characters that a model's text may hold."""
    print(text.translate(CONTROLS), end=end, flush=True)


def result_object(value: Mapping[str, Any]) -> None:
    """Prints one JSON object."""
    result(json.dumps(value, ensure_ascii=False, indent=2))


def notes() -> Console:
    """The console on stderr: no markup and no guessing of what should be coloured."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def progress(console: Console, *, refreshes: bool = True) -> Progress:
    """A bar that goes when it is done and is left out where stderr is no terminal.

    Without ``refreshes`` no thread redraws it, which would take time from what is measured: call ``refresh``.
    """
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    shown = console.is_terminal and not console.is_dumb_terminal
    return Progress(*columns, console=console, transient=True, disable=not shown, auto_refresh=refreshes)


def table(console: Console, rows: Sequence[Sequence[Text | str]], flexible: int, heads: Sequence[str] = ()) -> None:
    """Prints rows in columns as wide as their texts, but for one, ``flexible``, that gets what is left of the line.

    Columns to the right of it, which hold numbers, are aligned to the right.
    """
    lines = [[Text(head, style="dim") for head in heads]] if heads else []
    lines += [[cell.copy() if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(*lines, strict=True)]
    taken = sum(widths) - widths[flexible] + len(GAP) * (len(widths) - 1)
    widths[flexible] = max(MIN_FLEXIBLE, min(widths[flexible], console.width - taken))
    for line in lines:
        for number, (cell, width) in enumerate(zip(line, widths, strict=True)):
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if number > flexible else "left", width)
        console.print(Text(GAP).join(line), soft_wrap=True)


def working(console: Console, what: str) -> AbstractContextManager[object]:
    """Says what is being done for as long as it takes."""
    return console.status(what, spinner="line")
