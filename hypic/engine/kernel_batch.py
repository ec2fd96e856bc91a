"""Packing a step for kernels: a ``Batch`` whose plan is ``KernelPlan``, of its own or as a recorded step's contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hypic.engine.batch import Batch, Context, Final, QueryBlock, chain_tokens, contexts_of, final_of, is_decode
from hypic.engine.chain import Chain, RowLink, To
from hypic.engine.kernel_arrays import Arrays, Ints, arrays, decode_arrays
from hypic.engine.kernel_buffer import Sent, resolved
from hypic.engine.kernel_plan import Counts, kernel_plan
from hypic.engine.kernel_tiles import Tiling, attention_plan, tile_arrays
from hypic.engine.pool import Pool
from hypic.engine.run_arrays import SHORT_ROW, RunCounts, run_arrays, runs_of

# Rows from which a prompt that is run whole is one dense causal product rather than tiles over pages.
MIN_DENSE_TOKENS = 512


@dataclass(frozen=True)
class Geometry:
    """What packing must know of a model: ``paged`` if every full-attention layer reads pages by kernel, in tiles as
    ``tiling`` says; ``gathers`` if interiors are moved before they are read, rather than as they are. Chains of rows
    alone are runs where they have ``min_run_tokens`` together; ``None``: no kernel carries a state through them."""

    conv_width: int
    paged: bool
    gathers: bool
    tiling: Tiling = Tiling()
    min_run_tokens: int | None = None


@dataclass(frozen=True)
class Packed:
    """A step's arrays on the host, and what of it is no array."""

    found: dict[str, Ints]
    num_outputs: int
    dense: tuple[slice, ...]
    runs: RunCounts | None = None


def chunk_size_of(chains: Sequence[Chain]) -> int:
    """16 for short rows, of which padding to 64 would be most; else 64."""
    lengths = [len(link.ids) for chain in chains for link in chain.links if isinstance(link, RowLink)]
    return 16 if sum(lengths) < SHORT_ROW * len(lengths) else 64


def packed(chains: Sequence[Chain], geometry: Geometry, starts: Sequence[int] | None = None) -> Packed:
    """``starts`` say where each chain's token slots lie in a table that the device holds already; then there are no
    runs."""
    spans, decodes = chain_tokens(chains), is_decode(chains)
    runs = runs_of(chains, None if starts is not None else geometry.min_run_tokens)
    if decodes:
        found, num_outputs = decode_arrays(chains, geometry.conv_width, chunk_size_of(chains)), len(chains)
    else:
        size = chunk_size_of([chain for number, chain in enumerate(chains) if number not in runs])
        found, num_outputs = arrays(chains, geometry.conv_width, size, geometry.gathers, runs)
    run, counts = run_arrays([chains[number] for number in runs], [spans[number].start for number in runs])
    is_dense = [geometry.paged and starts is None and _is_dense(chain) for chain in chains]
    if geometry.paged:
        found |= _slot_arrays(chains) if starts is None else _table_arrays(spans, found, starts)
        tile = geometry.tiling.tile(chains, decodes, starts is not None)
        found |= tile_arrays(chains, spans, is_dense, found, tile, geometry.tiling)
    dense = tuple(span for span, whole in zip(spans, is_dense, strict=True) if whole)
    if counts is not None:
        counts = counts._replace(others=_joined([span for number, span in enumerate(spans) if number not in runs]))
    return Packed(found | run, num_outputs, dense, counts)


def _joined(spans: Sequence[slice]) -> slice | None:
    """Spans in order as one, if they follow each other."""
    follow = bool(spans) and all(one.stop == other.start for one, other in pairwise(spans))
    return slice(spans[0].start, spans[-1].stop) if follow else None


def pack(chains: Sequence[Chain], geometry: Geometry, pool: Pool) -> Batch:
    """A step of its own: nothing padded, everything sent."""
    made = packed(chains, geometry)
    made.found["write_places"] = resolved(made.found["write_places"], made.num_outputs)
    sent, spans, to = Sent(made.found, pool.device), chain_tokens(chains), To(pool.device)
    if geometry.paged:
        final, contexts = Final(sent.long("finals"), ()), _dense_contexts(made.dense)
    else:
        final, contexts = final_of(chains, spans, to), contexts_of(chains, spans, to)
    slots, decodes = sent["slots"] if geometry.paged else None, is_decode(chains)
    tile = geometry.tiling.tile(chains, decodes, is_recorded=False)
    num_keys = 0 if slots is None or tile == 1 else len(slots)
    batch = batch_of(sent, made.num_outputs, geometry, pool, slots, Room(tile, num_keys), made.runs)
    return batch.standing_in(final, contexts, tuple(spans), decodes)


@dataclass(frozen=True)
class Room:
    """Tokens of a tile; keys that there is room for once they are turned, or 0; whether other steps will follow in the
    same arrays."""

    tile: int
    num_keys: int
    is_recorded: bool = False


def batch_of(
    sent: Sent,
    num_outputs: int,
    geometry: Geometry,
    pool: Pool,
    slots: Tensor | None,
    room: Room,
    runs: RunCounts | None = None,
) -> Batch:
    """The batch over arrays that were sent; ``slots`` hold the token slots of the chains' keys."""
    counts = Counts(len(sent["chunks"]), num_outputs, geometry.gathers, runs)
    attention = final_attention = None
    if slots is not None:
        attention = attention_plan(sent, slots, "", sent["positions"], room.tile, room.num_keys, room.is_recorded)
        final_attention = attention_plan(sent, slots, "final_", sent["final_positions"], 1, 0, room.is_recorded)
    return Batch(
        ids=sent["ids"],
        positions=sent.long("positions"),
        kv_slots=sent.long("kv_slots"),
        final=Final(sent.long("finals"), ()),
        conv=None,
        scan=None,
        contexts=(),
        chain_tokens=(),
        is_decode=False,
        kernels=kernel_plan(sent, counts, pool, attention, final_attention),
    )


def _is_dense(chain: Chain) -> bool:
    return chain.num_tokens == len(chain.context) >= MIN_DENSE_TOKENS and chain.key_positions is None


def _dense_contexts(spans: Sequence[slice]) -> tuple[Context, ...]:
    """Chains whose keys are their own rows, all of them, so that no slots are needed."""
    none = torch.empty(0, dtype=torch.long)
    blocks = [QueryBlock(span, span.stop - span.start, None, is_causal=True) for span in spans]
    return tuple(Context(none, none, (block,)) for block in blocks)


def _slot_arrays(chains: Sequence[Chain]) -> dict[str, Ints]:
    """Token slots of every chain's keys, one chain after the other."""
    lengths = np.asarray([len(chain.context) for chain in chains])
    found = {"slots": np.concatenate([chain.context for chain in chains]), "starts": np.cumsum(lengths) - lengths}
    if any(chain.key_positions is not None for chain in chains):
        turns = [np.arange(len(c.context)) if c.key_positions is None else c.key_positions for c in chains]
        found["key_positions"] = np.concatenate([t[: len(c.context)] for t, c in zip(turns, chains, strict=True)])
    return {name: values.astype(np.int32) for name, values in found.items()}


def _table_arrays(spans: Sequence[slice], found: Arrays, starts: Sequence[int]) -> dict[str, Ints]:
    """Where chains' token slots begin in the table, and where the step's own tokens' go."""
    begins = np.asarray(starts, dtype=np.int32)
    owners = np.repeat(begins, [span.stop - span.start for span in spans])
    return {"starts": begins, "table_places": owners + found["positions"]}
