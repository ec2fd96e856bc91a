"""One step's work for the device: packed rows, the chains they stand in, and where results go.

The scheduler describes *links* (``RowLink``, ``InteriorLink``) in prompt order; ``Batch.pack`` turns them into index
tensors, once for all layers. Interiors that are encoded in this very step are no special case: layer by layer they are
written into the pool before anything reads it. Nothing here depends on a model but its convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink, To
from hypic.engine.conv_plan import ConvPlan, Tails
from hypic.engine.scan_plan import CHUNK_SIZES, ScanPlan, chunk_size_for, scan_plan
from hypic.engine.segment import Slots

__all__ = [
    "CHUNK_SIZES",
    "Batch",
    "Chain",
    "Context",
    "ConvPlan",
    "Final",
    "FoldInto",
    "InteriorLink",
    "QueryBlock",
    "RowLink",
    "ScanPlan",
    "chunk_size_for",
]
QUERY_BLOCK = 1024


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
        to = To(device)
        return Batch(
            ids=to(ids),
            positions=to(positions),
            kv_slots=to(np.concatenate([row.kv_slots for row in rows])),
            final=_final(chains, tokens, positions, to),
            conv=Tails(chains, conv_width, len(ids)).plan(to),
            scan=scan_plan(chains, rows, len(ids), key_dim, to),
            contexts=tuple(_context(chain, span, positions, to) for chain, span in zip(chains, tokens, strict=True)),
            chain_tokens=tuple(tokens),
            is_decode=all(_is_decode(chain) for chain in chains),
        )


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


def _final(chains: Sequence[Chain], spans: Sequence[slice], positions: Slots, to: To) -> Final:
    """The last token of every chain that wants logits."""
    kept = [span.stop - 1 if chain.wants_logits else -1 for chain, span in zip(chains, spans, strict=True)]
    tokens = np.asarray([token for token in kept if token >= 0], dtype=np.int64)
    contexts, row = [], 0
    for chain, token in zip(chains, kept, strict=True):
        span = slice(row, row + (token >= 0))
        contexts.append(_context(chain, span, positions[tokens], to))
        row = span.stop
    return Final(to(tokens), tuple(contexts))


def _context(chain: Chain, span: slice, positions: Slots, to: To) -> Context:
    keys = np.arange(len(chain.context)) if chain.key_positions is None else chain.key_positions[: len(chain.context)]
    blocks = []
    for start in range(span.start, span.stop, QUERY_BLOCK):
        tokens = slice(start, min(start + QUERY_BLOCK, span.stop))
        blocks.append(_block(tokens, positions[tokens], to))
    whole = span.stop - span.start
    if whole == len(chain.context):
        blocks = [QueryBlock(span, whole, None, is_causal=True)]
    return Context(to(chain.context), to(keys), tuple(blocks))


def _block(tokens: slice, positions: Slots, to: To) -> QueryBlock:
    num_keys = int(positions[-1]) + 1
    if len(positions) == 1:
        return QueryBlock(tokens, num_keys, None, is_causal=False)
    mask = to(positions)[:, None] >= torch.arange(num_keys, device=to.device)
    return QueryBlock(tokens, num_keys, mask, is_causal=False)
