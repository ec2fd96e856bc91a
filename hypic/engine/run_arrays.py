"""Runs of a step: chains of rows alone, long enough for kernels that carry the state themselves; numbers on the host.

A run's rows follow each other in *rounds*: round ``r`` takes the ``r``-th row of every run, each from the state after
its row of the round before. Rows between which nothing is kept, neither a snapshot nor a map, are one row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypic.engine.chain import Chain, FoldInto, RowLink
from hypic_kernels.rows import row_arrays

Ints = NDArray[np.int32]
# Tokens a row of a chain must have on average: below, padding to chunks of 64 would be most of the work.
SHORT_ROW = 48
# Rows of a chain that are kept apart: each waits for the one before, while the maps of all are made side by side.
MOST_ROUNDS = 4


class RoundCounts(NamedTuple):
    """What of a round is no array: tokens and chunks of the rows that are folded, which stand first; and whether some
    of them belong to an interior that was begun in an earlier step."""

    num_fold_tokens: int
    num_fold_chunks: int
    is_continued: bool


@dataclass(frozen=True)
class RunRow:
    """Tokens ``first .. first + num_tokens - 1`` of the step; ``write_slots`` receive the state after them."""

    first: int
    num_tokens: int
    fold: FoldInto | None
    write_slots: tuple[int, ...]

    def joined(self, later: RunRow) -> RunRow:
        return replace(later, first=self.first, num_tokens=self.num_tokens + later.num_tokens)

    @property
    def keeps(self) -> bool:
        """Whether something is kept of it alone."""
        return self.fold is not None or bool(self.write_slots)


def runs_of(chains: Sequence[Chain], min_tokens: int | None) -> tuple[int, ...]:
    """Numbers of the chains that are runs, if these have ``min_tokens`` together; ``None``: there are none."""
    if min_tokens is None:
        return ()
    found = [number for number, chain in enumerate(chains) if _is_run(chain)]
    return tuple(found) if sum(chains[number].num_tokens for number in found) >= min_tokens else ()


def _is_run(chain: Chain) -> bool:
    is_rows = all(isinstance(link, RowLink) for link in chain.links)
    is_long = is_rows and chain.num_tokens >= SHORT_ROW * len(chain.links)
    return is_long and len(rows_of(chain, 0)) <= MOST_ROUNDS


def rows_of(chain: Chain, first: int) -> list[RunRow]:
    """A run's rows, whose tokens begin at ``first``; the last one writes the state after the chain."""
    rows: list[RunRow] = []
    for link in chain.links:
        assert isinstance(link, RowLink), "a run has rows alone"
        slots = () if link.snapshot_slot is None else (link.snapshot_slot,)
        row = RunRow(first, len(link.ids), link.fold, slots)
        is_one = bool(rows) and not rows[-1].keeps and row.fold is None
        rows = [*rows[:-1], rows[-1].joined(row)] if is_one else [*rows, row]
        first += row.num_tokens
    return [*rows[:-1], replace(rows[-1], write_slots=(*rows[-1].write_slots, chain.final_slot))]


def run_arrays(chains: Sequence[Chain], firsts: Sequence[int]) -> tuple[dict[str, Ints], tuple[RoundCounts, ...]]:
    """All rounds of runs, by name, ``run0_tokens`` and so on; ``firsts`` are the runs' first tokens.

    ``initial`` are slots in the first round, then places among the states after the round before. ``write_slots``
    receive the states at ``write_places``. What else there is stands with ``Round`` and ``hypic_kernels.rows``.
    """
    runs = [rows_of(chain, first) for chain, first in zip(chains, firsts, strict=True)]
    found: dict[str, Ints] = {}
    counts: list[RoundCounts] = []
    places = {run: chain.initial_slot for run, chain in enumerate(chains)}
    for number in range(max(map(len, runs), default=0)):
        active = [run for run, rows in enumerate(runs) if number < len(rows)]
        active.sort(key=lambda run: runs[run][number].fold is None)
        rows = [runs[run][number] for run in active]
        made, count = _round([places[run] for run in active], rows)
        found |= {f"run{number}_{name}": np.asarray(values, dtype=np.int32) for name, values in made.items()}
        counts.append(count)
        places = {run: place for place, run in enumerate(active)}
    return found, tuple(counts)


def _round(initial: Sequence[int], rows: Sequence[RunRow]) -> tuple[dict[str, Sequence[int] | Ints], RoundCounts]:
    """Rows side by side, those that are folded first."""
    made, folds = row_arrays([row.num_tokens for row in rows]), [row.fold for row in rows if row.fold is not None]
    writes = [(place, slot) for place, row in enumerate(rows) for slot in row.write_slots]
    counts = int(made.cu_seqlens[len(folds)]), int(made.chunk_offsets[len(folds)])
    return {
        **made._asdict(),
        "tokens": np.concatenate([np.arange(row.first, row.first + row.num_tokens) for row in rows]),
        "initial": initial,
        "write_places": [place for place, _ in writes],
        "write_slots": [slot for _, slot in writes],
        "fold_states": [fold.state_slot for fold in folds],
        "fold_transitions": [fold.transition_slot for fold in folds],
    }, RoundCounts(*counts, any(fold.num_done > 0 for fold in folds))
