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
# Where places do not count, a segment is encoded for one of them.
ANY_PLACE = (0,)


def any_place(num_tokens: int) -> tuple[int, ...]:
    """The place for which one of so many tokens is encoded, where places do not count."""
    return ANY_PLACE


def warm(
    segments: Iterable[Segment],
    policy: Policy,
    piece_of: Callable[[Segment], Piece],
    submit: Callable[[list[Piece], Policy], Inbox],
    places: Callable[[int], Sequence[int]],
) -> Iterator[CacheReport]:
    """A report per segment, in order, as each is encoded; ``segments`` may come one by one. Each is encoded for all
    ``places`` of one of so many tokens: as if so many segments stood before it.

    Raises:
        PromptError: one is no ``Segment``.
        PromptTooLong, StoreFull: one could never be cached.
    """
    waiting: deque[list[Inbox]] = deque()
    for segment in segments:
        pieces = warm_pieces(segment, piece_of)
        ways = [[replace(pieces[0], place=place), *pieces[1:]] for place in places(len(pieces[0].ids))]
        waiting.append([submit(way, policy) for way in ways])
        if len(waiting) >= WARM_AT_ONCE:
            yield _report(waiting.popleft())
    while waiting:
        yield _report(waiting.popleft())


def warm_pieces(segment: Segment, piece_of: Callable[[Segment], Piece], place: int = 0) -> list[Piece]:
    """A segment, and a token behind it that is never run: it stands for the text that will follow. ``place`` segments
    count as standing before it.

    Raises:
        PromptError: it is no ``Segment``.
    """
    if not isinstance(segment, Segment):
        raise PromptError(f"warm was given {segment!r:.60}; pass a list of Segment.")
    return [replace(piece_of(segment), place=place), Piece((0,))]


def _report(inboxes: Sequence[Inbox]) -> CacheReport:
    """Of all entries of one segment: no hit if one of them was none, and bytes and tokens of all together but for those
    of the prompt, which count once."""
    found = [Answer().take(inbox.get()).report for inbox in inboxes]
    reports = [report for report in found if report is not None]
    assert len(reports) == len(inboxes), "a warmed segment comes with its report"
    rows = [row for report in reports for row in report.segments]
    told = next((row for row in rows if row.outcome != "hit"), rows[0])
    row = replace(told, num_bytes=sum(row.num_bytes for row in rows))
    computed, reused = (
        sum(tokens) for tokens in zip(*((r.computed_tokens, r.reused_tokens) for r in reports), strict=True)
    )
    return replace(reports[-1], segments=(row,), computed_tokens=computed, reused_tokens=reused)
