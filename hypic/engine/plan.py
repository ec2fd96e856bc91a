"""From pieces of a prompt to a plan. (Under construction; ``Piece`` is settled.)"""

from __future__ import annotations

from dataclasses import dataclass

from hypic.types import Segment


@dataclass(frozen=True)
class Piece:
    """A run of prompt tokens: a segment's, or live text's when ``segment`` is ``None``.

    ``ends_message`` marks a point at which the prompt may later be continued: the end of the
    leading live text and the end of each message's content. A snapshot may be taken there.
    """

    ids: tuple[int, ...]
    segment: Segment | None = None
    ends_message: bool = False
