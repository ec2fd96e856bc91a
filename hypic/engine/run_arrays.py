"""Runs of a step: chains of rows alone, long enough for kernels that carry the state themselves; numbers on the host.

A run is walked from its first token to its last in chunks. Parts of it between which something is kept, a snapshot or
a map, begin a chunk each: places without a token fill up the chunk before, and the state there is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypic.engine.chain import Chain, FoldInto, RowLink
from hypic.engine.segment import Slots
from hypic_kernels.rows import CHUNK, NO_TOKEN, row_arrays

Ints = NDArray[np.int32]
# Tokens a row of a chain must have on average: below, padding to chunks of 64 would be most of the work.
SHORT_ROW = 48
# Parts of a chain that are kept apart: each takes a whole state, in float32, of every layer while it runs.
MOST_PARTS = 4


class RunCounts(NamedTuple):
    """What of runs is no array: states kept within rows; whether an interior was begun in an earlier step; and the span
    of the tokens that stand in no run, if they follow each other (None: there are none, or others between)."""

    num_marks: int
    is_continued: bool
    others: slice | None = None


@dataclass(frozen=True)
class RunPart:
    """Tokens ``first .. first + num_tokens - 1`` of the step; ``write_slots`` receive the state after them."""

    first: int
    num_tokens: int
    fold: FoldInto | None
    write_slots: tuple[int, ...]

    def joined(self, later: RunPart) -> RunPart:
        return replace(later, first=self.first, num_tokens=self.num_tokens + later.num_tokens)

    @property
    def keeps(self) -> bool:
        """Whether something is kept of it alone."""
        return self.fold is not None or bool(self.write_slots)

    def continues(self, earlier: RunPart) -> bool:
        """Whether both belong to one interior."""
        slots = [None if part.fold is None else part.fold.state_slot for part in (self, earlier)]
        return slots[0] is not None and slots[0] == slots[1]


def runs_of(chains: Sequence[Chain], min_tokens: int | None) -> tuple[int, ...]:
    """Numbers of the chains that are runs, if these have ``min_tokens`` together; ``None``: there are none."""
    if min_tokens is None:
        return ()
    found = [number for number, chain in enumerate(chains) if _is_run(chain)]
    return tuple(found) if sum(chains[number].num_tokens for number in found) >= min_tokens else ()


def _is_run(chain: Chain) -> bool:
    is_rows = all(isinstance(link, RowLink) for link in chain.links)
    is_long = is_rows and chain.num_tokens >= SHORT_ROW * len(chain.links)
    return is_long and len(parts_of(chain, 0)) <= MOST_PARTS


def parts_of(chain: Chain, first: int) -> list[RunPart]:
    """A run's parts, whose tokens begin at ``first``; the last one writes the state after the chain."""
    parts: list[RunPart] = []
    for link in chain.links:
        assert isinstance(link, RowLink), "a run has rows alone"
        slots = () if link.snapshot_slot is None else (link.snapshot_slot,)
        part = RunPart(first, len(link.ids), link.fold, slots)
        is_one = bool(parts) and not parts[-1].keeps and part.fold is None
        parts = [*parts[:-1], parts[-1].joined(part)] if is_one else [*parts, part]
        first += part.num_tokens
    return [*parts[:-1], replace(parts[-1], write_slots=(*parts[-1].write_slots, chain.final_slot))]


def run_arrays(chains: Sequence[Chain], firsts: Sequence[int]) -> tuple[dict[str, Ints], RunCounts | None]:
    """All runs by name, ``run_tokens`` and so on; ``firsts`` are the runs' first tokens. None: there are no runs.

    Rows as ``hypic_kernels.rows`` has them, one a run, from the states in slots ``run_initial``. States that are kept
    have places, those within rows first, then those at rows' ends: ``run_write_slots`` receive those at
    ``run_write_places``, and a fold leads from one to another, ``run_fold_ends``.
    """
    if not chains:
        return {}, None
    runs = [parts_of(chain, first) for chain, first in zip(chains, firsts, strict=True)]
    walked = _Walked()
    for number, parts in enumerate(runs):
        walked.take(parts, number)
    made = row_arrays([sum(_places(parts)) for parts in runs])
    found = {
        **made._asdict(),
        "tokens": np.concatenate(walked.tokens),
        "folds": np.reshape(walked.folds, (-1, 2)),
        "marks": walked.marks,
        "initial": [chain.initial_slot for chain in chains],
        "fold_ends": walked.resolved(np.reshape(walked.fold_ends, (-1, 2))),
        "fold_states": [fold.state_slot for fold in walked.into],
        "fold_transitions": [fold.transition_slot for fold in walked.into],
        "fold_begun": [fold.num_done > 0 for fold in walked.into],
        "write_places": walked.resolved(np.asarray(walked.write_places, dtype=np.int64)),
        "write_slots": walked.write_slots,
    }
    counts = RunCounts(walked.num_marks, any(fold.num_done > 0 for fold in walked.into))
    return {f"run_{name}": np.asarray(values, dtype=np.int32) for name, values in found.items()}, counts


def _places(parts: Sequence[RunPart]) -> list[int]:
    """Of each part: its tokens, and what fills up its last chunk if another part follows."""
    whole = [-(-part.num_tokens // CHUNK) * CHUNK for part in parts[:-1]]
    return [*whole, parts[-1].num_tokens]


@dataclass
class _Walked:
    """Runs part by part. States at rows' ends are ``-1 - run`` until all marks are counted."""

    tokens: list[Slots] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    folds: list[tuple[int, int]] = field(default_factory=list)
    fold_ends: list[tuple[int, int]] = field(default_factory=list)
    into: list[FoldInto] = field(default_factory=list)
    write_places: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    num_marks: int = 0

    def take(self, parts: Sequence[RunPart], run: int) -> None:
        before = None  # the place of the state before a part, where it is kept
        for number, (part, num_places) in enumerate(zip(parts, _places(parts), strict=True)):
            first, num_chunks = len(self.marks), -(-num_places // CHUNK)
            if before is None and part.fold is not None:
                before = self.num_marks
            self._chunks(part, num_places, num_chunks, before)
            after = self._after(part, run, number + 1 == len(parts))
            if part.fold is not None:
                assert before is not None, "the state before an interior is kept"
                begun = number > 0 and part.continues(parts[number - 1])
                self._fold(part.fold, (first, first + num_chunks), (before, after), begun)
            self.write_places += [after] * len(part.write_slots)
            self.write_slots += part.write_slots
            before = after if part.keeps else None

    def _chunks(self, part: RunPart, num_places: int, num_chunks: int, before: int | None) -> None:
        tokens = np.full(num_places, NO_TOKEN)
        tokens[: part.num_tokens] = np.arange(part.first, part.first + part.num_tokens)
        self.tokens.append(tokens)
        self.marks += [-1 if before is None else before, *[-1] * (num_chunks - 1)]
        self.num_marks += before is not None

    def _after(self, part: RunPart, run: int, is_last: bool) -> int:
        """The place of the state after a part: before the next one's first chunk, or at the row's end."""
        return -1 - run if is_last else self.num_marks

    def _fold(self, into: FoldInto, chunks: tuple[int, int], ends: tuple[int, int], begun: bool) -> None:
        if begun:
            chunks, ends = (self.folds.pop()[0], chunks[1]), (self.fold_ends.pop()[0], ends[1])
            into = self.into.pop()
        self.folds.append(chunks)
        self.fold_ends.append(ends)
        self.into.append(into)

    def resolved(self, places: Slots) -> Slots:
        return np.where(places < 0, self.num_marks - 1 - places, places)
