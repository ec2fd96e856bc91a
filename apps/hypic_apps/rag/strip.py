"""A prompt as the page draws it: its pieces in order, segments with what happened to them, live text between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypic.types import CacheReport, Message, Segment, SegmentReport
from hypic_apps.cli.engine import NO_THINKING

EXCERPT_CHARS = 160


def strip(pieces: Sequence[tuple[int, Segment | None]], report: CacheReport | None, has_turns: bool) -> list[Any]:
    """Objects for the pieces of a prompt, given as tokens and segment; without a report all is pending."""
    reports: Iterator[SegmentReport | None] = iter(report.segments if report is not None else ())
    last = len(pieces) - 1
    shown = []
    for number, (num_tokens, segment) in enumerate(pieces):
        if segment is None:
            shown.append(_live(num_tokens, number == 0, number == last, has_turns))
        else:
            shown.append(_segment(num_tokens, segment, next(reports, None), report))
    return shown


def pieces_of(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[int, Segment | None]]:
    """Tokens and segment of every piece of a prompt, in order."""
    pieces = tokenizer.encode(messages, chat_template_kwargs=NO_THINKING)
    return [(len(piece.ids), piece.segment) for piece in pieces if piece.ids]


def counts(report: CacheReport) -> dict[str, Any]:
    """The numbers of a report. ``head_tokens`` came from an exact head of the prompt, not from segments."""
    hits = [segment for segment in report.segments if segment.outcome == "hit"]
    interiors = sum(segment.num_cached(report.policy) for segment in hits)
    return {
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "reused_tokens": report.reused_tokens,
        "head_tokens": max(0, report.reused_tokens - interiors),
        "num_segments": len(report.segments),
        "num_hits": report.num_hits,
        "ttft_s": report.times_s.get("ttft"),
        "total_s": report.times_s.get("total"),
    }


def _live(num_tokens: int, is_first: bool, is_last: bool, has_turns: bool) -> dict[str, Any]:
    label = "text between passages"
    if is_first:
        label = "earlier questions and answers" if has_turns else "start of the chat template"
    if is_last:
        label = "your question, and the end of the chat template"
    return {"outcome": "live", "label": label, "source": "", "tokens": num_tokens, "seam": 0, "reason": "live text"}


def _segment(
    num_tokens: int, segment: Segment, told: SegmentReport | None, report: CacheReport | None
) -> dict[str, Any]:
    outcome = "pending" if told is None else told.outcome
    num_rows = 0
    if report is not None and told is not None and outcome in ("hit", "encoded"):
        num_rows = num_tokens - told.num_cached(report.policy)
    return {
        "outcome": outcome,
        "label": segment.name or "passage",
        "source": segment.source or "",
        "tokens": num_tokens,
        "seam": num_rows,
        "reason": "" if told is None else told.reason,
        "excerpt": segment.text[:EXCERPT_CHARS],
    }
