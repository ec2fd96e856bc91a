"""Chunks of rows, interiors, and the order in which their maps are scanned: the plan of a step's linear layers.

Chunks have the sizes that suit the rows they are cut from, and stand in *sources*: one of each size, and one of the
interiors. Within a source they stand in the order in which the scan comes to them, so that chains that are walked side
by side are mostly one product, and nothing has to be copied from where it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import combinations
from typing import TypeVar

import numpy as np
from torch import Tensor

from hypic.engine.affine import Factor, Move, merged
from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink, To
from hypic.engine.segment import Slots

CHUNK_SIZES = (16, 32, 64)
# What a second size of chunks costs besides its work: launches.
OF_A_SIZE = 1_000_000
Lengths = TypeVar("Lengths", int, Slots)


@dataclass(frozen=True)
class ScanPlan:
    """``chunks``, of each size ``[M, C]``, hold token numbers (``N`` pads); ``token_chunks [N]`` is the inverse into
    all of them, flat and in a row.

    States have *places*: before every chunk, before every interior, then after every chain. ``starts`` are those before
    the chains' first links. ``encodes`` and ``requests`` are the moves of chains that encode and of those that may read
    what is encoded here; the former's interiors come first. What is folded has the map ``T`` that ``factors`` give and
    ``B = S - T S_0``, with the states of places ``fold_after`` and ``fold_before``; the ``continued`` of them follow
    what was folded in earlier steps.
    """

    chunks: tuple[Tensor, ...]
    token_chunks: Tensor
    num_places: int
    starts: Tensor
    initial_slots: Tensor
    encodes: tuple[Move, ...]
    requests: tuple[Move, ...]
    num_known: int
    interior_states: Tensor
    interior_transitions: Tensor
    interior_origins: Tensor
    replaced: dict[str, Tensor]
    write_slots: Tensor
    write_places: Tensor
    factors: tuple[Factor, ...]
    fold_before: Tensor
    fold_after: Tensor
    fold_states: Tensor
    fold_transitions: Tensor
    continued: Tensor


def chunk_sizes_for(row_lengths: Sequence[int], key_dim: int = 64) -> tuple[int, ...]:
    """The chunk sizes of least work: per chunk its scores, its map, and its step of the scan.

    With heads of ``K`` channels a chunk of ``C`` tokens costs about ``4 K C^2 + 2 K^2 C + K^3`` multiplications.
    """
    lengths = np.asarray(row_lengths)
    if lengths.max(initial=0) <= CHUNK_SIZES[0]:
        return CHUNK_SIZES[:1]
    work = {size: _work(lengths, size, key_dim) for size in CHUNK_SIZES}
    some = [sizes for count in (1, 2, 3) for sizes in combinations(CHUNK_SIZES, count)]
    least = {sizes: np.min([work[size] for size in sizes], axis=0).sum() + OF_A_SIZE * len(sizes) for sizes in some}
    return min(some, key=lambda sizes: float(least[sizes]))


def _work(num_tokens: Lengths, size: int, key_dim: int) -> Lengths:
    return -(-num_tokens // size) * (4 * key_dim * size**2 + 2 * key_dim**2 * size + key_dim**3)


@dataclass(eq=False)
class _Item:
    """A map in a chain: of a chunk with tokens ``start..stop-1``, or of an interior; where it stands in its source."""

    source: int
    start: int = 0
    stop: int = 0
    interior: InteriorLink | None = None
    compose: str = "transition"
    row: int = -1


@dataclass
class _Walk:
    """Items by chain; what happens behind some of them; folds as the items of their rows."""

    sizes: tuple[int, ...]
    key_dim: int
    chains: list[list[_Item]] = field(default_factory=list)
    folds: list[tuple[FoldInto, int, int, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)
    chosen: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, chain: Chain) -> None:
        items, number = list[_Item](), len(self.chains)
        for link in chain.links:
            if isinstance(link, InteriorLink):
                items.append(_Item(len(self.sizes), interior=link, compose=chain.compose))
                continue
            first = len(items)
            items += self._row(len(link.ids))
            if link.fold is not None:
                self.folds.append((link.fold, number, first, len(items)))
            if link.snapshot_slot is not None:
                self.snapshots.append((number, len(items), link.snapshot_slot))
        self.chains.append(items)

    def _row(self, num_tokens: int) -> list[_Item]:
        source, start = self._source_for(num_tokens), self.num_tokens
        size = self.sizes[source]
        self.num_tokens += num_tokens
        return [_Item(source, at, min(at + size, self.num_tokens)) for at in range(start, self.num_tokens, size)]

    def _source_for(self, num_tokens: int) -> int:
        if num_tokens not in self.chosen:
            work = [_work(num_tokens, size, self.key_dim) for size in self.sizes]
            self.chosen[num_tokens] = work.index(min(work))
        return self.chosen[num_tokens]


class _Places:
    """Rows of items in their sources, in the order in which the scan comes to them, and the states' places."""

    def __init__(self, walk: _Walk) -> None:
        self.chains, num_sources = walk.chains, len(walk.sizes) + 1
        encoding = {number for _, number, _, _ in walk.folds}
        self.phases = [_sorted(walk.chains, encoding), _sorted(walk.chains, set(range(len(walk.chains))) - encoding)]
        self.sources: list[list[_Item]] = [[] for _ in range(num_sources)]
        for item in joined.from_iterable(_abreast(walk.chains, phase) for phase in self.phases):
            item.row = len(self.sources[item.source])
            self.sources[item.source].append(item)
        counts = [len(items) for items in self.sources]
        self.bases = [sum(counts[:source]) for source in range(num_sources)]
        self.order = [*self.phases[0], *self.phases[1]]
        self.finals = {number: sum(counts) + column for column, number in enumerate(self.order)}
        self.num_places = sum(counts) + len(walk.chains)

    def before(self, number: int, position: int) -> int:
        """The place of the state before an item of a chain; behind the last one, of the state after the chain."""
        items = self.chains[number]
        return self.of(items[position]) if position < len(items) else self.finals[number]

    def of(self, item: _Item) -> int:
        return self.bases[item.source] + item.row

    def moves(self, phase: Sequence[int]) -> tuple[Move, ...]:
        """Chains side by side, step by step; neighbours in all their places together."""
        found: list[Move] = []
        for position in range(max((len(self.chains[number]) for number in phase), default=0)):
            here = [number for number in phase if position < len(self.chains[number])]
            found += merged([self._move(number, position) for number in here])
        return tuple(found)

    def _move(self, number: int, position: int) -> Move:
        item = self.chains[number][position]
        return Move(item.source, item.row, self.of(item), self.before(number, position + 1), 1)


def _sorted(chains: Sequence[Sequence[_Item]], numbers: set[int]) -> list[int]:
    return sorted(numbers, key=lambda number: (-len(chains[number]), number))


def _abreast(chains: Sequence[Sequence[_Item]], phase: Sequence[int]) -> list[_Item]:
    longest = max((len(chains[number]) for number in phase), default=0)
    return [chains[n][position] for position in range(longest) for n in phase if position < len(chains[n])]


def _chunks(sources: Sequence[Sequence[_Item]], sizes: Sequence[int], num_tokens: int) -> tuple[list[Slots], Slots]:
    tables, inverse, base = [], np.empty(num_tokens, dtype=np.int64), 0
    for items, size in zip(sources, sizes, strict=False):
        table = np.full((len(items), size), num_tokens, dtype=np.int64)
        for item in items:
            count = item.stop - item.start
            table[item.row, :count] = np.arange(item.start, item.stop)
            inverse[item.start : item.stop] = np.arange(base + item.row * size, base + item.row * size + count)
        tables.append(table)
        base += table.size
    return tables, inverse


def _factors(walk: _Walk, folds: Sequence[tuple[FoldInto, int, int, int]]) -> tuple[Factor, ...]:
    """The maps of every fold in order, one from each fold at a time; folds stand in columns."""
    items = [walk.chains[number][first:last] for _, number, first, last in folds]
    found: list[Factor] = []
    for position in range(max(map(len, items), default=0)):
        here = [(column, own[position]) for column, own in enumerate(items) if position < len(own)]
        found += merged([Factor(item.source, item.row, column, 1, position == 0) for column, item in here])
    return tuple(found)


def scan_plan(chains: Sequence[Chain], rows: Sequence[RowLink], num_tokens: int, key_dim: int, to: To) -> ScanPlan:
    walk = _Walk(chunk_sizes_for([len(row.ids) for row in rows], key_dim), key_dim)
    for chain in chains:
        walk.add(chain)
    places = _Places(walk)
    tables, inverse = _chunks(places.sources, walk.sizes, num_tokens)
    ranks = {number: rank for rank, number in enumerate(places.order)}
    folds = sorted(walk.folds, key=lambda fold: (fold[2] - fold[3], ranks[fold[1]]))
    writes = {chain.final_slot: places.finals[number] for number, chain in enumerate(chains)}
    writes |= {slot: places.before(number, position) for number, position, slot in walk.snapshots}
    interiors = places.sources[-1]
    links = [item.interior for item in interiors if item.interior is not None]
    return ScanPlan(
        chunks=tuple(map(to, tables)),
        token_chunks=to(inverse),
        num_places=places.num_places,
        starts=to([places.before(number, 0) for number in range(len(chains))]),
        initial_slots=to([chain.initial_slot for chain in chains]),
        encodes=places.moves(places.phases[0]),
        requests=places.moves(places.phases[1]),
        num_known=sum(item.interior is not None for n in places.phases[0] for item in walk.chains[n]),
        interior_states=to([link.state_slot for link in links]),
        interior_transitions=to([link.transition_slot for link in links]),
        interior_origins=to([link.origin for link in links]),
        replaced=_replaced(interiors, to),
        write_slots=to(list(writes)),
        write_places=to(list(writes.values())),
        factors=_factors(walk, folds),
        fold_before=to([places.before(number, first) for _, number, first, _ in folds]),
        fold_after=to([places.before(number, last) for _, number, _, last in folds]),
        fold_states=to([into.state_slot for into, *_ in folds]),
        fold_transitions=to([into.transition_slot for into, *_ in folds]),
        continued=to([column for column, (into, *_) in enumerate(folds) if into.num_done]),
    )


def _replaced(interiors: Sequence[_Item], to: To) -> dict[str, Tensor]:
    """Numbers of interiors, by the ablation that replaces their transitions."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(interiors):
        if item.compose != "transition":
            found[item.compose].append(number)
    return {compose: to(numbers) for compose, numbers in found.items()}
