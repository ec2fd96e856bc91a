"""A step's whole numbers for the kernels, on the host: chains of links to one array a name, nothing padded yet.

What the numbers mean stands with ``KernelPlan`` and with each kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from itertools import chain as joined
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypic.engine.chain import ZERO_SLOT, Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.conv_arrays import conv_arrays
from hypic.engine.segment import Slots
from hypic_kernels.compose import IDENTITY, NOT_WANTED, STILL, ZERO
from hypic_kernels.conv import NOTHING

Ints = NDArray[np.int32]
Arrays = Mapping[str, Ints]
REPLACED = {"addition": IDENTITY, "last": ZERO}


@dataclass
class Elements:
    """The chains of maps of one step, in order; built link by link.

    Interiors are named by their slots, or, where they are gathered (and moved) first, by their number; ``turns`` are
    these numbers, -1 for chunks, by which rotations of interiors are found that are read where they are stored.
    """

    chunk_size: int
    gathers: bool
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    interiors: list[InteriorLink] = field(default_factory=list)
    folds: list[tuple[FoldInto, range]] = field(default_factory=list)
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)
    num_chunks: int = 0

    @classmethod
    def of(cls, chains: Sequence[Chain], chunk_size: int, gathers: bool) -> Elements:
        made = cls(chunk_size, gathers)
        for number, chain in enumerate(chains):
            for link in chain.links:
                made._interior(link, chain.compose) if isinstance(link, InteriorLink) else made._row(link, number)
            made.ends.append(len(made.rows))
        return made

    def _interior(self, link: InteriorLink, compose: str) -> None:
        number = len(self.interiors)
        transition, state = (number, number) if self.gathers else (link.transition_slot, link.state_slot)
        self.rows.append((1, REPLACED.get(compose, transition), state, NOT_WANTED))
        self.turns.append(number)
        self.interiors.append(link)

    def _row(self, link: RowLink, chain: int) -> None:
        own = range(self.num_chunks, self.num_chunks + -(-len(link.ids) // self.chunk_size))
        self.num_chunks = own.stop
        self.rows += [(0, chunk, chunk, chunk) for chunk in own]
        self.turns += [STILL] * len(own)
        if link.fold is not None:
            self.folds.append((link.fold, own))
        if link.snapshot_slot is not None:
            self.snapshots.append((chain, len(self.rows), link.snapshot_slot))

    def wanted(self) -> tuple[int, dict[tuple[int, int], int]]:
        """Rows of states that the scan gives before elements, and which of them (or ``-1 - chain``: the chain's final)
        holds the state after a snapshot's row, by its ``(chain, element)``."""
        outputs, places = self.num_chunks, {}
        for chain, element, _ in self.snapshots:
            if element == self.ends[chain + 1]:
                places[chain, element] = -1 - chain
                continue
            source, transition, state, output = self.rows[element]
            if output == NOT_WANTED:
                output, outputs = outputs, outputs + 1
                self.rows[element] = (source, transition, state, output)
            places[chain, element] = output
        return outputs, places


def arrays(
    chains: Sequence[Chain], conv_width: int, chunk_size: int, gathers: bool, runs: Collection[int] = ()
) -> tuple[dict[str, Ints], int]:
    """All of a step but its attention, by name, unpadded; and how many states before elements it wants.

    Chains whose numbers are ``runs`` have no maps: their tokens stand in no chunk.
    """
    rows = [link for chain in chains for link in chain.links if isinstance(link, RowLink)]
    lengths = np.asarray([len(row.ids) for row in rows])
    stops = lengths.cumsum()
    num_tokens = int(stops[-1])
    firsts = np.asarray([row.position for row in rows]) - (stops - lengths)
    mapped = [chain for number, chain in enumerate(chains) if number not in runs]
    tokens = _tokens_but(chains, runs) if runs else np.arange(num_tokens)
    made, num_outputs = _mapped_arrays(mapped, tokens, num_tokens, chunk_size, gathers)
    found = {
        "ids": np.fromiter(joined.from_iterable(row.ids for row in rows), np.int32, num_tokens),
        "positions": firsts.repeat(lengths) + np.arange(num_tokens),
        "kv_slots": np.concatenate([row.kv_slots for row in rows]),
        "finals": _finals(chains),
        **made,
        **conv_arrays(chains, conv_width, num_tokens),
    }
    return {name: np.asarray(values, dtype=np.int32) for name, values in found.items()}, num_outputs


def _finals(chains: Sequence[Chain]) -> list[int]:
    """The last token of every chain that wants logits."""
    stops = accumulate(chain.num_tokens for chain in chains)
    return [stop - 1 for stop, chain in zip(stops, chains, strict=True) if chain.wants_logits]


def _tokens_but(chains: Sequence[Chain], runs: Collection[int]) -> Slots:
    """Numbers of the tokens of all chains but the runs."""
    lengths = [chain.num_tokens for chain in chains]
    return np.flatnonzero(np.repeat([number not in runs for number in range(len(chains))], lengths))


def _mapped_arrays(
    chains: Sequence[Chain], tokens: Slots, num_tokens: int, chunk_size: int, gathers: bool
) -> tuple[dict[str, Any], int]:
    """Of the chains whose chunks become maps; ``tokens`` of the step are theirs."""
    elements = Elements.of(chains, chunk_size, gathers)
    num_outputs, places = elements.wanted()
    writes = {chain.final_slot: -1 - number for number, chain in enumerate(chains)}
    writes.update({slot: places[chain, element] for chain, element, slot in elements.snapshots})
    lengths = [len(link.ids) for chain in chains for link in chain.links if isinstance(link, RowLink)]
    chunks, inverse = _chunks(np.asarray(lengths, dtype=np.int64), chunk_size, tokens, num_tokens)
    table = np.asarray(elements.rows, dtype=np.int32).reshape(-1, 4)
    return {
        "chunks": chunks,
        "token_chunks": inverse,
        "elements": table,
        "element_turns": elements.turns,
        **_slotted_arrays(elements, table, chains),
        "cu_elements": elements.ends,
        "initial_slots": [chain.initial_slot for chain in chains],
        "final_slots": [chain.final_slot for chain in chains],
        "write_slots": list(writes),
        "write_places": list(writes.values()),
        "interior_states": [link.state_slot for link in elements.interiors],
        "interior_transitions": [link.transition_slot for link in elements.interiors],
        "interior_origins": [link.origin for link in elements.interiors],
        **(_fold_arrays(elements) if elements.folds else {}),
    }, num_outputs


def decode_arrays(chains: Sequence[Chain], conv_width: int, chunk_size: int) -> dict[str, Ints]:
    """The same for a step in which every chain is one row of one token behind a state: all of it follows from the
    chains' slots, so nothing is walked."""
    rows = [link for chain in chains for link in chain.links if isinstance(link, RowLink)]
    num, width = len(chains), conv_width - 1
    numbers, none = np.arange(num, dtype=np.int32), np.empty(0, dtype=np.int32)
    initial, final = (_ints(slots) for slots in zip(*((c.initial_slot, c.final_slot) for c in chains), strict=True))
    chunks = np.full((num, chunk_size), num, dtype=np.int32)
    chunks[:, 0] = numbers
    elements = np.zeros((num, 4), dtype=np.int32)
    elements[:, 1:] = numbers[:, None]
    sources = np.empty((num, conv_width), dtype=np.int32)
    sources[:, :width] = -1 - (initial[:, None] * width + np.arange(width, dtype=np.int32))
    sources[initial == ZERO_SLOT, :width] = NOTHING
    sources[:, width] = numbers
    return {
        "ids": _ints([row.ids[0] for row in rows]),
        "positions": _ints([row.position for row in rows]),
        "kv_slots": _ints([row.kv_slots[0] for row in rows]),
        "finals": numbers[[chain.wants_logits for chain in chains]],
        "chunks": chunks,
        "token_chunks": numbers * chunk_size,
        "elements": elements,
        "element_turns": np.full(num, -1, dtype=np.int32),
        "cu_elements": np.arange(num + 1, dtype=np.int32),
        "initial_slots": initial,
        "final_slots": final,
        "write_slots": final,
        "write_places": -1 - numbers,
        **dict.fromkeys(("interior_states", "interior_transitions", "interior_origins"), none),
        "conv_sources": sources,
        "conv_write_slots": final,
        "conv_write_sources": sources[:, 1:],
    }


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int32)


def _chunks(lengths: Slots, size: int, tokens: Slots, num_tokens: int) -> tuple[Slots, Slots]:
    """Numbers of ``tokens``, row by row, by chunk ``[M, C]``, padded with ``num_tokens``; where each stands in that."""
    counts = -(-lengths // size)
    stops = counts.cumsum()
    shifts = (stops - counts) * size - (lengths.cumsum() - lengths)
    inverse = np.add(shifts.repeat(lengths), np.arange(len(tokens)))
    chunks = np.full((int(stops[-1]) if len(stops) else 0) * size, num_tokens)
    chunks[inverse] = tokens
    return chunks.reshape(-1, size), inverse


def _slotted_arrays(elements: Elements, table: Ints, chains: Sequence[Chain]) -> dict[str, Ints | list[int]]:
    """The same elements for a scan that writes straight into state slots: what is wanted before an element are
    snapshots alone, and those at a chain's end are copied from its final slot."""
    rows = table.copy()
    rows[:, 3] = NOT_WANTED
    copies_from, copies_to = list[int](), list[int]()
    for chain, element, slot in elements.snapshots:
        if element == elements.ends[chain + 1]:
            copies_from.append(chains[chain].final_slot)
            copies_to.append(slot)
        else:
            rows[element, 3] = slot
    return {"slotted_elements": rows, "copies_from": copies_from, "copies_to": copies_to}


def _fold_arrays(elements: Elements) -> dict[str, Sequence[int] | Ints]:
    """Chains of what is folded already (source 1) and of this step's chunks (source 0)."""
    rows: list[tuple[int, int, int, int]] = []
    ends = [0]
    for into, own in elements.folds:
        if into.num_done:
            rows.append((1, into.transition_slot, into.state_slot, NOT_WANTED))
        rows += [(0, chunk, chunk, NOT_WANTED) for chunk in own]
        ends.append(len(rows))
    return {
        "fold_elements": np.asarray(rows).reshape(-1, 4),
        "fold_cu_elements": ends,
        "fold_states": [into.state_slot for into, _ in elements.folds],
        "fold_transitions": [into.transition_slot for into, _ in elements.folds],
    }
