"""One step's work for the device: packed rows, the chains they stand in, and where results go.

The scheduler describes *links* (``RowLink``, ``InteriorLink``) in prompt order; ``Batch.pack`` turns them into index
tensors, once for all layers. Interiors that are encoded in this very step are no special case: layer by layer they are
written into the pool before anything reads it. Nothing here depends on a model but its convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hypic.engine.affine import Schedule
from hypic.engine.segment import Slots

CHUNK_SIZES = (16, 32, 64)
QUERY_BLOCK = 1024
ZERO_SLOT = 0


@dataclass(frozen=True)
class FoldInto:
    """The interior this row belongs to: where its map and tail go, and how many of its tokens are folded already."""

    state_slot: int
    transition_slot: int
    num_done: int


@dataclass(frozen=True)
class RowLink:
    """Adjacent tokens to run: ``ids [n]`` at ``position``, K/V to ``kv_slots [n]``.

    ``snapshot_slot`` receives the state after this row; ``fold`` marks a row of an interior being encoded.
    """

    ids: Sequence[int]
    position: int
    kv_slots: Slots
    snapshot_slot: int | None = None
    fold: FoldInto | None = None


@dataclass(frozen=True)
class InteriorLink:
    """A cached interior of ``num_tokens``, of a segment that begins at prompt position ``origin``."""

    state_slot: int
    transition_slot: int
    num_tokens: int
    origin: int


@dataclass(frozen=True)
class Chain:
    """The links of one request (or of one segment being encoded) that run in this step.

    ``context [n]`` are the token slots of positions ``0..n-1`` up to the last row's end. ``key_positions`` differs
    from ``0..n-1`` only in the ablation without rotation. ``initial_slot`` is the state so far (0: nothing).
    """

    links: Sequence[RowLink | InteriorLink]
    context: Slots
    initial_slot: int
    final_slot: int
    wants_logits: bool = False
    key_positions: Slots | None = None
    compose: str = "transition"

    @property
    def num_tokens(self) -> int:
        return sum(len(link.ids) for link in self.links if isinstance(link, RowLink))


@dataclass(frozen=True)
class ConvPlan:
    """Short convolution over packed rows, each behind its history.

    Indices point into the table ``[tokens | tails of tail_slots, flattened | one zero row]``: ``sources`` lists every
    row's history and tokens, ``outputs [N]`` where the tokens' outputs stand in the valid convolution of that list, and
    ``write_sources [P, W-1]`` what becomes the tails of ``write_slots [P]``.
    """

    tail_slots: Tensor
    sources: Tensor
    outputs: Tensor
    write_slots: Tensor
    write_sources: Tensor


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


@dataclass(frozen=True)
class QueryBlock:
    """Queries ``tokens`` of one chain against its first ``num_keys`` positions; ``mask [q, k]``, causal, or open."""

    tokens: slice
    num_keys: int
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True)
class Context:
    """One chain for full attention: ``slots [n]`` of its keys, their positions, and its blocks of queries."""

    slots: Tensor
    key_positions: Tensor
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True)
class Final:
    """The rows whose logits are wanted, ``tokens [R]``, and their queries: all that the last layer has to give."""

    tokens: Tensor
    contexts: tuple[Context, ...]


@dataclass(frozen=True)
class Batch:
    """See the module's docstring. ``is_decode``: every chain is one row of one token behind a state."""

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    final: Final
    conv: ConvPlan
    scan: ScanPlan
    contexts: tuple[Context, ...]
    chain_tokens: tuple[slice, ...]
    is_decode: bool

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @staticmethod
    def pack(chains: Sequence[Chain], conv_width: int, device: torch.device, key_dim: int = 64) -> Batch:
        """Chains that encode stand before the chains that read what they encode; ``key_dim`` is a linear head's."""
        rows = [link for chain in chains for link in chain.links if isinstance(link, RowLink)]
        ids = np.concatenate([np.asarray(row.ids, dtype=np.int64) for row in rows])
        positions = np.concatenate([np.arange(row.position, row.position + len(row.ids)) for row in rows])
        tokens = _chain_tokens(chains)
        to = _To(device)
        return Batch(
            ids=to(ids),
            positions=to(positions),
            kv_slots=to(np.concatenate([row.kv_slots for row in rows])),
            final=_final(chains, tokens, positions, to),
            conv=_Tails(chains, conv_width, len(ids)).plan(to),
            scan=_scan_plan(chains, rows, len(ids), key_dim, to),
            contexts=tuple(_context(chain, span, positions, to) for chain, span in zip(chains, tokens, strict=True)),
            chain_tokens=tuple(tokens),
            is_decode=all(_is_decode(chain) for chain in chains),
        )


@dataclass(frozen=True)
class _To:
    device: torch.device

    def __call__(self, values: Sequence[int] | Slots) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device, non_blocking=True)


def _is_decode(chain: Chain) -> bool:
    link = chain.links[0]
    is_row = len(chain.links) == 1 and isinstance(link, RowLink) and len(link.ids) == 1
    return is_row and link.fold is None and link.snapshot_slot is None  # type: ignore[union-attr]


def _chain_tokens(chains: Sequence[Chain]) -> list[slice]:
    spans, start = [], 0
    for chain in chains:
        spans.append(slice(start, start + chain.num_tokens))
        start += chain.num_tokens
    return spans


def _final(chains: Sequence[Chain], spans: Sequence[slice], positions: Slots, to: _To) -> Final:
    """The last token of every chain that wants logits."""
    kept = [span.stop - 1 if chain.wants_logits else -1 for chain, span in zip(chains, spans, strict=True)]
    tokens = np.asarray([token for token in kept if token >= 0], dtype=np.int64)
    contexts, row = [], 0
    for chain, token in zip(chains, kept, strict=True):
        span = slice(row, row + (token >= 0))
        contexts.append(_context(chain, span, positions[tokens], to))
        row = span.stop
    return Final(to(tokens), tuple(contexts))


def _context(chain: Chain, span: slice, positions: Slots, to: _To) -> Context:
    keys = np.arange(len(chain.context)) if chain.key_positions is None else chain.key_positions[: len(chain.context)]
    blocks = []
    for start in range(span.start, span.stop, QUERY_BLOCK):
        tokens = slice(start, min(start + QUERY_BLOCK, span.stop))
        blocks.append(_block(tokens, positions[tokens], to))
    whole = span.stop - span.start
    if whole == len(chain.context):
        blocks = [QueryBlock(span, whole, None, is_causal=True)]
    return Context(to(chain.context), to(keys), tuple(blocks))


def _block(tokens: slice, positions: Slots, to: _To) -> QueryBlock:
    num_keys = int(positions[-1]) + 1
    if len(positions) == 1:
        return QueryBlock(tokens, num_keys, None, is_causal=False)
    mask = to(positions)[:, None] >= torch.arange(num_keys, device=to.device)
    return QueryBlock(tokens, num_keys, mask, is_causal=False)


class _Tails:
    """Follows, on the host, which raw inputs precede every row: indices into the table of ``ConvPlan``."""

    def __init__(self, chains: Sequence[Chain], conv_width: int, num_tokens: int) -> None:
        self.width, self.num_tokens = conv_width - 1, num_tokens
        self.slots: dict[int, int] = {}
        self.written: dict[int, list[int]] = {}
        self.writes: dict[int, list[int]] = {}
        self.sources: list[Slots | list[int]] = []
        self.outputs: list[Slots] = []
        self.token = self.packed = 0
        for chain in chains:
            self._walk(chain)

    def _stored(self, slot: int, count: int) -> list[int]:
        """The last ``count`` inputs kept in a slot; -1 marks the zero row."""
        if slot == ZERO_SLOT:
            return [-1] * count
        if slot in self.written:
            return self.written[slot][len(self.written[slot]) - count :] if count else []
        base = self.num_tokens + self.slots.setdefault(slot, len(self.slots)) * self.width
        return list(range(base + self.width - count, base + self.width))

    def _walk(self, chain: Chain) -> None:
        history = self._stored(chain.initial_slot, self.width)
        for link in chain.links:
            if isinstance(link, InteriorLink):
                history = self._last(history + self._stored(link.state_slot, min(self.width, link.num_tokens)))
                continue
            tokens = range(self.token, self.token + len(link.ids))
            self._row(history, tokens)
            recent = list(tokens[max(0, len(tokens) - self.width) :])
            history = self._last(history + recent)
            if link.fold is not None:
                done = self._stored(link.fold.state_slot, min(self.width, link.fold.num_done))
                self.writes[link.fold.state_slot] = self.written[link.fold.state_slot] = self._last(done + recent)
            if link.snapshot_slot is not None:
                self.writes[link.snapshot_slot] = history
        self.writes[chain.final_slot] = history

    def _last(self, history: list[int]) -> list[int]:
        return history[len(history) - min(self.width, len(history)) :]

    def _row(self, history: list[int], tokens: range) -> None:
        self.sources.append(history)
        self.sources.append(np.arange(tokens.start, tokens.stop))
        self.outputs.append(np.arange(self.packed, self.packed + len(tokens)))
        self.packed += self.width + len(tokens)
        self.token = tokens.stop

    def plan(self, to: _To) -> ConvPlan:
        zero = self.num_tokens + len(self.slots) * self.width
        sources = np.concatenate([np.asarray(part, dtype=np.int64) for part in self.sources])
        writes = [[-1] * (self.width - len(tail)) + tail for tail in self.writes.values()]
        table = np.asarray(writes, dtype=np.int64).reshape(len(writes), self.width)
        return ConvPlan(
            tail_slots=to(list(self.slots)),
            sources=to(np.where(sources < 0, zero, sources)),
            outputs=to(np.concatenate(self.outputs)),
            write_slots=to(list(self.writes)),
            write_sources=to(np.where(table < 0, zero, table)),
        )


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


def _scan_plan(chains: Sequence[Chain], rows: Sequence[RowLink], num_tokens: int, key_dim: int, to: _To) -> ScanPlan:
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
    )
