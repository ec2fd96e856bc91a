"""What became of one request of a test: its logits by position, its emissions, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hypic.errors import HypicError
from hypic.types import CacheReport, Completion
from tests.engine.expected import relative
from tests.reference import Result


@dataclass
class Answer:
    """What became of one request: logits by position (of every token that was run for it) and its emissions."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen_from: set[int] = field(default_factory=set)
    runs: list[int] = field(default_factory=list)
    pieces: list[Completion] = field(default_factory=list)
    error: HypicError | None = None
    is_over: bool = False

    @property
    def ids(self) -> list[int]:
        return [i for piece in self.pieces for i in piece.token_ids]

    @property
    def report(self) -> CacheReport:
        report = self.pieces[-1].report
        assert report is not None, "only a finished answer has a report"
        return report

    @property
    def outcomes(self) -> list[str]:
        return [segment.outcome for segment in self.report.segments]

    @property
    def reasons(self) -> list[str]:
        return [segment.reason for segment in self.report.segments]

    def rows(self, positions: Sequence[int] | None = None) -> Tensor:
        """Logits ``[N, V]`` in the order of positions."""
        return torch.stack([self.logits[p] for p in (sorted(self.logits) if positions is None else positions)])

    def error_to(self, expected: Result) -> float:
        """Largest relative difference over all rows of the reference; each must have been run."""
        assert sorted(self.logits) == expected.positions.tolist(), "other tokens were run than the contract asks for"
        return relative(self.rows(), expected.logits)

    def error_where_run(self, expected: Result) -> float:
        """The same over the rows that were run: behind a snapshot these are fewer."""
        wanted = {int(p): row for p, row in zip(expected.positions, expected.logits, strict=True)}
        positions = sorted(self.logits)
        return relative(self.rows(positions), torch.stack([wanted[p] for p in positions]))
