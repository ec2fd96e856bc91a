"""Encoding segments ahead of any question: many at a time, so that they share the engine's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

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
) -> Iterator[CacheReport]:
    """A report per segment, in order, as each is encoded; ``segments`` may come one by one.

    Raises:
        PromptError: one is no ``Segment``.
        PromptTooLong, StoreFull: one could never be cached.
    """
    waiting: deque[Inbox] = deque()
    for segment in segments:
        waiting.append(submit(warm_pieces(segment, encode), policy))
        if len(waiting) >= WARM_AT_ONCE:
            yield _report(waiting.popleft())
    while waiting:
        yield _report(waiting.popleft())


def warm_pieces(segment: Segment, encode: Callable[[str], list[int]]) -> list[Piece]:
    """A segment, and a token behind it that is never run: it stands for the text that will follow.

    Raises:
        PromptError: it is no ``Segment``.
    """
    if not isinstance(segment, Segment):
        raise PromptError(f"warm was given {segment!r:.60}; pass a list of Segment.")
    return [Piece(tuple(encode(segment.text.strip())), segment), Piece((0,))]


def _report(inbox: Inbox) -> CacheReport:
    report = Answer().take(inbox.get()).report
    assert report is not None, "a warmed segment comes with its report"
    return report
