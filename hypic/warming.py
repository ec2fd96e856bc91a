"""Encoding segments ahead of any question: many at a time, so that they share the engine's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hypic.engine.plan import Piece
from hypic.errors import PromptError
from hypic.stream import Answer, Inbox
from hypic.types import CacheReport, Policy, Segment

WARM_AT_ONCE = 32


def warm(
    segments: Iterable[Segment],
    policy: Policy,
    encode: Callable[[str], list[int]],
    submit: Callable[[list[Piece], Policy], Inbox],
    places: Sequence[int] = (0,),
) -> Iterator[CacheReport]:
    """A report per segment, in order, as each is encoded; ``segments`` may come one by one. Each is encoded for all
    ``places``: as if so many segments stood before it.

    Raises:
        PromptError: one is no ``Segment``.
        PromptTooLong, StoreFull: one could never be cached.
    """
    waiting: deque[list[Inbox]] = deque()
    for segment in segments:
        waiting.append([submit(warm_pieces(segment, encode, place), policy) for place in places])
        if len(waiting) >= WARM_AT_ONCE:
            yield _report(waiting.popleft())
    while waiting:
        yield _report(waiting.popleft())


def warm_pieces(segment: Segment, encode: Callable[[str], list[int]], place: int = 0) -> list[Piece]:
    """A segment, and a token behind it that is never run: it stands for the text that will follow. ``place`` segments
    count as standing before it.

    Raises:
        PromptError: it is no ``Segment``.
    """
    if not isinstance(segment, Segment):
        raise PromptError(f"warm was given {segment!r:.60}; pass a list of Segment.")
    return [Piece(tuple(encode(segment.text.strip())), segment, place=place), Piece((0,))]


def _report(inboxes: Sequence[Inbox]) -> CacheReport:
    """Of all entries of one segment: no hit if one of them was none, their bytes and what was run for them together."""
    found = [Answer().take(inbox.get()).report for inbox in inboxes]
    reports = [report for report in found if report is not None]
    assert len(reports) == len(inboxes), "a warmed segment comes with its report"
    rows = [row for report in reports for row in report.segments]
    told = next((row for row in rows if row.outcome != "hit"), rows[0])
    row = replace(told, num_bytes=sum(row.num_bytes for row in rows))
    return replace(reports[0], segments=(row,), computed_tokens=sum(report.computed_tokens for report in reports))
