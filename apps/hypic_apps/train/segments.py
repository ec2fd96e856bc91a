"""Where the segments of training rows lie, as hypic would make them: what tuning for segment reuse needs to know.

Marks are one whole number a token: 0 for live text, ``-n`` in the seam of the row's ``n``-th segment (what is run in
context) and ``n`` in its interior (what is cached). Every passage is a segment, unless the policy runs it live.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from hypic import Policy
from hypic_apps.train.render import Row

# Longer passages are run live: canonical attention sees so many tokens back, which bounds its cost (``streams``).
LONGEST = 512


@dataclass(frozen=True)
class Segmenting:
    """Which passages are segments and which of their tokens seams: the ``policy`` says so. A ``plain_share`` of
    training rows has no segments, so that a model tuned for reuse stays good under full recompute.

    Raises:
        ValueError: the share does not lie between 0 and 1.
    """

    policy: Policy = Policy()
    plain_share: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.plain_share <= 1.0:
            raise ValueError(f"the share of rows without segments is {self.plain_share}; it must lie from 0 to 1.")

    def marks(self, row: Row) -> NDArray[np.int16]:
        """Marks ``[T]`` of a row."""
        marks = np.zeros(len(row), np.int16)
        cached = [(span, interiors) for span in row.spans if (interiors := self._interiors(span))]
        for number, ((start, stop), interiors) in enumerate(cached, start=1):
            marks[start:stop] = -number
            for first, last in interiors:
                marks[start + first : start + last] = number
        return marks

    def drawn(self, rows: Sequence[Row], seed: int) -> NDArray[np.int16]:
        """Marks ``[B, T]`` of training rows, of which the ``plain_share`` have none."""
        return np.stack(list(self._drawn(rows, Random(seed))))

    def _drawn(self, rows: Sequence[Row], r: Random) -> Iterator[NDArray[np.int16]]:
        for row in rows:
            yield np.zeros(len(row), np.int16) if r.random() < self.plain_share else self.marks(row)

    def _interiors(self, span: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        num_tokens = span[1] - span[0]
        return () if num_tokens > LONGEST else self.policy.interiors(num_tokens)
