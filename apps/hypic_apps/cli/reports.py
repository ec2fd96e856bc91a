"""A ``CacheReport`` for people, as a table on stderr, and for programs, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.text import Text

from hypic.types import CacheReport, SegmentReport
from hypic_apps.cli.screen import table

STYLES = {"hit": "green", "encoded": "yellow", "live": "blue"}
EXPECTED = ("", "first time")


def show_passages(console: Console, report: CacheReport, texts: Sequence[str]) -> None:
    """One line per segment: what happened to it, its length, where it is from and how it begins."""
    rows = [
        (f"{number:>2}", outcome_text(segment), f"{segment.num_tokens:>4} tokens", passage_text(segment, text))
        for number, (segment, text) in enumerate(zip(report.segments, texts, strict=True), 1)
    ]
    table(console, rows, flexible=3)


def show_counts(console: Console, report: CacheReport) -> None:
    """Tokens computed and reused, and the time to the first token."""
    console.print(counts(report), style="dim")


def counts(report: CacheReport) -> str:
    """Tokens computed and reused, and the time to the first token, as one line."""
    return (
        f"{report.prompt_tokens:,} prompt tokens: {report.computed_tokens:,} computed, "
        f"{report.reused_tokens:,} reused; first token after {seconds(report.times_s['ttft'])}"
    )


def seconds(value: float) -> str:
    """A time with three digits that mean something."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.{1 if value < 0.01 else 0}f} ms"


def outcome_text(segment: SegmentReport) -> Text:
    """The outcome, with the reason where it is not the obvious one."""
    text = Text(segment.outcome, style=STYLES[segment.outcome])
    return text if segment.reason in EXPECTED else text.append(f" ({segment.reason})", style="dim")


def passage_text(segment: SegmentReport, text: str) -> Text:
    """Where a passage is from, and its first words."""
    words = " ".join(text.split()).lstrip("# ")
    source = file_name(segment.source) or segment.name or ""
    rest = words.removeprefix(source)
    return Text(source, style="bold").append(f"  {words}" if rest == words else rest, style="not bold dim")


def file_name(source: str | None) -> str | None:
    """Where a passage is from, without the folders that lead there."""
    return source and PurePath(source).name


def as_json(report: CacheReport) -> dict[str, Any]:
    """Counts, times and segments of a report."""
    return {
        "segments": [{**asdict(segment), "source": file_name(segment.source)} for segment in report.segments],
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "reused_tokens": report.reused_tokens,
        "times_s": dict(report.times_s),
        "notes": list(report.notes),
    }
