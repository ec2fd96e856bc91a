"""How many tokens a step may have: as many as were asked for, and fewer for a while after a device ran out of memory.

A shortage halves the limit, and about full steps that go well double it again: smaller ones say nothing about memory,
and are not held up by the limit either. A limit that had grown and fails again needs twice as many good steps the next
time, so a device that stays short is tried ever more seldom. As many good steps at the full size end the matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PATIENCE = 16


@dataclass
class StepLimit:
    """``tokens``, from ``least`` to ``most``. ``has_grown``: since the last shortage, so that it may come again."""

    most: int
    least: int
    tokens: int = field(init=False)
    has_grown: bool = False
    _patience: int = PATIENCE
    _num_good: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.most

    def ran_short(self) -> None:
        """A step found no memory."""
        self._patience *= 2 if self.has_grown else 1
        self._num_good, self.has_grown = 0, False
        self.tokens = min(self.most, max(self.least, self.tokens // 2))

    def ran(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` went well."""
        self._num_good += 2 * num_tokens >= self.tokens
        if self._num_good < self._patience:
            return
        self._num_good, self.has_grown = 0, self.tokens < self.most
        if self.has_grown:
            self.tokens = min(self.most, 2 * self.tokens)
        else:
            self._patience = PATIENCE
