"""One step's work for the device: packed rows, the chains they stand in, and where results go.

The scheduler describes *links* (``RowLink``, ``InteriorLink``) in prompt order; ``Batch.pack`` turns them into index
tensors, once for all layers. Interiors that are encoded in this very step are no special case: layer by layer they are
written into the pool before anything reads it. Nothing here depends on a model but its convolution width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink, To
from hypic.engine.conv_plan import ConvPlan, Tails
from hypic.engine.kernel_plan import KernelPlan
from hypic.engine.scan_plan import CHUNK_SIZES, ScanPlan, chunk_sizes_for, scan_plan
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
    "chunk_sizes_for",
]
# Queries of a block see the keys up to its last one: small blocks spare keys that are masked, large ones calls.
QUERY_BLOCK = 128


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
    """See the module's docstring. ``is_decode``: every chain is one row of one token behind a state.

    A step is planned for plain torch, by ``conv``, ``scan`` and ``contexts``, or for ``kernels``; then ``contexts`` are
    the chains that attention does not read through pages.
    """

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    final: Final
    conv: ConvPlan | None
    scan: ScanPlan | None
    contexts: tuple[Context, ...]
    chain_tokens: tuple[slice, ...]
    is_decode: bool
    kernels: KernelPlan | None = None

    def standing_in(
        self, final: Final, contexts: tuple[Context, ...], chain_tokens: tuple[slice, ...], is_decode: bool
    ) -> Batch:
        """The same rows, with what is known of their chains."""
        return replace(self, final=final, contexts=contexts, chain_tokens=chain_tokens, is_decode=is_decode)

    @property
    def interior_origins(self) -> Tensor:
        """Prompt positions where the interiors' segments begin, ``[I]``."""
        plan = self.kernels if self.kernels is not None else self.scan
        assert plan is not None, "a step has a plan of its scans"
        return plan.interior_origins

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @staticmethod
    def pack(chains: Sequence[Chain], conv_width: int, device: torch.device, key_dim: int = 64) -> Batch:
        """Chains that encode stand before the chains that read what they encode; ``key_dim`` is a linear head's."""
        rows = [link for chain in chains for link in chain.links if isinstance(link, RowLink)]
        ids = np.concatenate([np.asarray(row.ids, dtype=np.int64) for row in rows])
        positions = np.concatenate([np.arange(row.position, row.position + len(row.ids)) for row in rows])
        tokens = chain_tokens(chains)
        to = To(device)
        return Batch(
            ids=to(ids),
            positions=to(positions),
            kv_slots=to(np.concatenate([row.kv_slots for row in rows])),
            final=final_of(chains, tokens, to),
            conv=Tails(chains, conv_width, len(ids)).plan(to),
            scan=scan_plan(chains, rows, len(ids), key_dim, to),
            contexts=contexts_of(chains, tokens, to),
            chain_tokens=tuple(tokens),
            is_decode=is_decode(chains),
        )


def is_decode(chains: Sequence[Chain]) -> bool:
    """Whether every chain is one row of one token behind a state."""
    return all(_is_decode(chain) for chain in chains)


def _is_decode(chain: Chain) -> bool:
    link = chain.links[0]
    is_row = len(chain.links) == 1 and isinstance(link, RowLink) and len(link.ids) == 1
    return is_row and link.fold is None and link.snapshot_slot is None  # type: ignore[union-attr]


def chain_tokens(chains: Sequence[Chain]) -> list[slice]:
    """Which of the step's tokens are each chain's."""
    spans, start = [], 0
    for chain in chains:
        spans.append(slice(start, start + chain.num_tokens))
        start += chain.num_tokens
    return spans


def final_of(chains: Sequence[Chain], spans: Sequence[slice], to: To) -> Final:
    """The last token of every chain that wants logits."""
    contexts: list[Context] = []
    tokens: list[int] = []
    for chain, span in zip(chains, spans, strict=True):
        row = slice(len(tokens), len(tokens) + chain.wants_logits)
        contexts.append(_context(chain, row, _positions(chain)[-1:], to))
        tokens += [span.stop - 1] if chain.wants_logits else []
    return Final(to(np.asarray(tokens, dtype=np.int64)), tuple(contexts))


def contexts_of(chains: Sequence[Chain], spans: Sequence[slice], to: To) -> tuple[Context, ...]:
    """All rows of every chain against its keys."""
    pairs = zip(chains, spans, strict=True)
    return tuple(_context(chain, span, _positions(chain), to) for chain, span in pairs)


def _positions(chain: Chain) -> Slots:
    """Of the chain's rows."""
    rows = [link for link in chain.links if isinstance(link, RowLink)]
    return np.concatenate([np.arange(row.position, row.position + len(row.ids)) for row in rows])


def _context(chain: Chain, span: slice, positions: Slots, to: To) -> Context:
    """``span`` of the queries' tensor stand at ``positions [n]``."""
    keys = np.arange(len(chain.context)) if chain.key_positions is None else chain.key_positions[: len(chain.context)]
    blocks = []
    for start in range(span.start, span.stop, QUERY_BLOCK):
        tokens = slice(start, min(start + QUERY_BLOCK, span.stop))
        here = slice(tokens.start - span.start, tokens.stop - span.start)
        blocks.append(_block(tokens, positions[here], to))
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
