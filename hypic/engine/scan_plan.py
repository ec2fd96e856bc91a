"""Chunks of rows, interiors, and the order in which their maps are scanned: the plan of a step's linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hypic.engine.affine import Schedule
from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink, To
from hypic.engine.segment import Slots

CHUNK_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class ScanPlan:
    """Chunks of rows, interiors, and the order in which their maps are scanned and folded.

    ``chunks [M, C]`` holds token numbers (``N`` pads), ``token_chunks [N]`` is its inverse into ``M * C``.
    ``write_places`` index ``[places before | chains' finals]``.
    """

    chunks: Tensor
    token_chunks: Tensor
    schedule: Schedule
    chunk_places: Tensor
    interior_places: Tensor
    interior_states: Tensor
    interior_transitions: Tensor
    interior_origins: Tensor
    replaced: dict[str, Tensor]
    initial_slots: Tensor
    write_slots: Tensor
    write_places: Tensor
    folds: Schedule
    fold_chunks: Tensor
    fold_states: Tensor
    fold_transitions: Tensor
    fold_begun: Tensor


def chunk_size_for(row_lengths: Sequence[int], key_dim: int = 64) -> int:
    """The chunk size of least work: per chunk its scores, its map, and its step of the scan.

    With heads of ``K`` channels a chunk of ``C`` tokens costs about ``4 K C^2 + 2 K^2 C + K^3`` multiplications.
    """
    lengths = np.asarray(row_lengths)
    counts = {size: float(np.ceil(lengths / size).sum()) for size in CHUNK_SIZES}
    work = {size: n * (4 * size**2 + 2 * key_dim * size + key_dim**2) for size, n in counts.items()}
    return min(CHUNK_SIZES, key=lambda size: work[size])


@dataclass
class _Walk:
    """Maps in chain order: per chain, numbers of chunks (>= 0) or of interiors (``-1 - i``)."""

    chains: list[list[int]] = field(default_factory=list)
    interiors: list[InteriorLink] = field(default_factory=list)
    replaced: dict[str, list[int]] = field(default_factory=dict)
    folds: list[list[int]] = field(default_factory=list)
    fold_into: list[FoldInto] = field(default_factory=list)
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)


def _walk(chains: Sequence[Chain], size: int) -> _Walk:
    walk, chunk = _Walk(), 0
    for number, chain in enumerate(chains):
        maps: list[int] = []
        for link in chain.links:
            if isinstance(link, InteriorLink):
                if chain.compose != "transition":
                    walk.replaced.setdefault(chain.compose, []).append(len(walk.interiors))
                maps.append(-1 - len(walk.interiors))
                walk.interiors.append(link)
                continue
            own = list(range(chunk, chunk + -(-len(link.ids) // size)))
            chunk += len(own)
            maps += own
            if link.fold is not None:
                walk.folds.append(own)
                walk.fold_into.append(link.fold)
            if link.snapshot_slot is not None:
                walk.snapshots.append((number, len(maps), link.snapshot_slot))
        walk.chains.append(maps)
    return walk


def _chunks(rows: Sequence[RowLink], size: int, num_tokens: int) -> tuple[Slots, Slots]:
    counts = [-(-len(row.ids) // size) for row in rows]
    chunks = np.full((sum(counts), size), num_tokens, dtype=np.int64)
    flat, token, chunk = chunks.reshape(-1), 0, 0
    inverse = np.empty(num_tokens, dtype=np.int64)
    for row, count in zip(rows, counts, strict=True):
        here = np.arange(chunk * size, chunk * size + len(row.ids))
        flat[here] = np.arange(token, token + len(row.ids))
        inverse[token : token + len(row.ids)] = here
        token, chunk = token + len(row.ids), chunk + count
    return chunks, inverse


def scan_plan(chains: Sequence[Chain], rows: Sequence[RowLink], num_tokens: int, key_dim: int, to: To) -> ScanPlan:
    size = chunk_size_for([len(row.ids) for row in rows], key_dim)
    chunks, inverse = _chunks(rows, size, num_tokens)
    walk = _walk(chains, size)
    schedule = Schedule.of([len(maps) for maps in walk.chains])
    places = [schedule.places(number, len(maps)) for number, maps in enumerate(walk.chains)]
    chunk_places = np.empty(len(chunks), dtype=np.int64)
    interior_places = np.empty(len(walk.interiors), dtype=np.int64)
    for maps, where in zip(walk.chains, places, strict=True):
        for item, place in zip(maps, where, strict=True):
            (chunk_places if item >= 0 else interior_places)[item if item >= 0 else -1 - item] = place
    finals = {chain: schedule.num_places + column for column, chain in enumerate(schedule.chains)}
    writes = {chain.final_slot: finals[number] for number, chain in enumerate(chains)}
    for number, count, slot in walk.snapshots:
        writes[slot] = places[number][count] if count < len(places[number]) else finals[number]
    folds = Schedule.of([len(own) for own in walk.folds])
    fold_chunks = np.empty(folds.num_places, dtype=np.int64)
    for number, own in enumerate(walk.folds):
        fold_chunks[folds.places(number, len(own))] = own
    return ScanPlan(
        chunks=to(chunks),
        token_chunks=to(inverse),
        schedule=schedule,
        chunk_places=to(chunk_places),
        interior_places=to(interior_places),
        interior_states=to([link.state_slot for link in walk.interiors]),
        interior_transitions=to([link.transition_slot for link in walk.interiors]),
        interior_origins=to([link.origin for link in walk.interiors]),
        replaced={compose: to(numbers) for compose, numbers in walk.replaced.items()},
        initial_slots=to([chains[number].initial_slot for number in schedule.chains]),
        write_slots=to(list(writes)),
        write_places=to(list(writes.values())),
        folds=folds,
        fold_chunks=to(fold_chunks),
        fold_states=to([walk.fold_into[number].state_slot for number in folds.chains]),
        fold_transitions=to([walk.fold_into[number].transition_slot for number in folds.chains]),
        fold_begun=to([walk.fold_into[number].num_done > 0 for number in folds.chains]),
    )
