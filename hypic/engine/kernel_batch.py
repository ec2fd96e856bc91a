"""Packing a step for kernels: a ``Batch`` whose plan is ``KernelPlan``, of its own or as a recorded step's contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hypic.engine.batch import Batch, Context, Final, QueryBlock, chain_tokens, contexts_of, final_of, is_decode
from hypic.engine.chain import Chain, RowLink, To
from hypic.engine.kernel_arrays import Arrays, Ints, arrays
from hypic.engine.kernel_buffer import Sent, resolved
from hypic.engine.kernel_plan import Counts, kernel_plan
from hypic.engine.pool import Pool
from hypic.engine.run_arrays import SHORT_ROW, RoundCounts, run_arrays, runs_of
from hypic_kernels.attention import Plan as AttentionPlan

# Rows from which a prompt that is run whole is one dense causal product rather than tiles over pages.
MIN_DENSE_TOKENS = 512
TILE = 16
NUM_PROGRAMS = 528  # four for every multiprocessor of a large GPU
MIN_SPLIT_KEYS = 128


@dataclass(frozen=True)
class Geometry:
    """What packing must know of a model: ``paged`` if every full-attention layer reads pages by kernel; ``gathers`` if
    interiors are moved before they are read. Chains of rows alone are runs where they have ``min_run_tokens`` together;
    ``None``: no kernel is there that carries the state through a run. ``has_fla``: on a GPU it is fla's."""

    conv_width: int
    num_kv_heads: int
    paged: bool
    gathers: bool
    min_run_tokens: int | None = None
    has_fla: bool = False


@dataclass(frozen=True)
class Packed:
    """A step's arrays on the host, and what of it is no array."""

    found: dict[str, Ints]
    num_outputs: int
    dense: tuple[slice, ...]
    rounds: tuple[RoundCounts, ...] = ()


def chunk_size_of(chains: Sequence[Chain]) -> int:
    """16 for short rows, of which padding to 64 would be most; else 64."""
    lengths = [len(link.ids) for chain in chains for link in chain.links if isinstance(link, RowLink)]
    return 16 if sum(lengths) < SHORT_ROW * len(lengths) else 64


def packed(chains: Sequence[Chain], geometry: Geometry, starts: Sequence[int] | None = None) -> Packed:
    """``starts`` say where each chain's token slots lie in a table that the device holds already; then there are no
    runs."""
    runs = runs_of(chains, None if starts is not None else geometry.min_run_tokens)
    chunk_size = chunk_size_of([chain for number, chain in enumerate(chains) if number not in runs])
    found, num_outputs = arrays(chains, geometry.conv_width, chunk_size, geometry.gathers, runs)
    spans = chain_tokens(chains)
    run, rounds = run_arrays([chains[number] for number in runs], [spans[number].start for number in runs])
    is_dense = [geometry.paged and starts is None and _is_dense(chain) for chain in chains]
    if geometry.paged:
        found |= _slot_arrays(chains) if starts is None else {"starts": np.asarray(starts, dtype=np.int32)}
        found |= _tile_arrays(chains, spans, is_dense, found, tile_of(chains))
    if not len(found["fold_states"]):
        found = {name: values for name, values in found.items() if not name.startswith("fold_")}
    dense = tuple(span for span, whole in zip(spans, is_dense, strict=True) if whole)
    return Packed(found | run, num_outputs, dense, rounds)


def pack(chains: Sequence[Chain], geometry: Geometry, pool: Pool) -> Batch:
    """A step of its own: nothing padded, everything sent."""
    made = packed(chains, geometry)
    made.found["write_places"] = resolved(made.found["write_places"], made.num_outputs)
    sent, spans, to = Sent(made.found, pool.device), chain_tokens(chains), To(pool.device)
    if geometry.paged:
        final, contexts = Final(sent.long("finals"), ()), _dense_contexts(made.dense)
    else:
        final, contexts = final_of(chains, spans, to), contexts_of(chains, spans, to)
    slots = sent["slots"] if geometry.paged else None
    batch = batch_of(sent, made.num_outputs, geometry, pool, slots, tile_of(chains), made.rounds)
    return batch.standing_in(final, contexts, tuple(spans), is_decode(chains))


def tile_of(chains: Sequence[Chain]) -> int:
    """Tokens of a tile: rows that a program would leave empty cost as much as full ones."""
    return 1 if is_decode(chains) else TILE


def batch_of(
    sent: Sent,
    num_outputs: int,
    geometry: Geometry,
    pool: Pool,
    slots: Tensor | None,
    tile: int,
    rounds: tuple[RoundCounts, ...] = (),
) -> Batch:
    """The batch over arrays that were sent; ``slots`` hold the token slots of the chains' keys."""
    counts = Counts(len(sent["chunks"]), num_outputs, geometry.gathers, rounds)
    attention = final_attention = None
    if slots is not None:
        attention = _attention(sent, slots, geometry, "", sent["positions"], tile)
        final_attention = _attention(sent, slots, geometry, "final_", sent["final_positions"], 1)
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


def _tile_arrays(
    chains: Sequence[Chain], spans: Sequence[slice], is_dense: Sequence[bool], found: Arrays, tile: int
) -> dict[str, Ints]:
    """Tiles of up to ``tile`` tokens of one chain; and, for the last layer, one of each token whose logits are wanted,
    counted among these."""
    tiles = [
        (number, first, min(tile, span.stop - first))
        for number, (span, dense) in enumerate(zip(spans, is_dense, strict=True))
        if not dense
        for first in range(span.start, span.stop, tile)
    ]
    wanting = [number for number, chain in enumerate(chains) if chain.wants_logits]
    finals = [(chain, number, 1) for number, chain in enumerate(wanting)]
    made = {"lengths": np.asarray([len(chain.context) for chain in chains], dtype=np.int32)}
    made["final_positions"] = found["positions"][found["finals"]]
    for prefix, rows in (("", tiles), ("final_", finals)):
        table = np.asarray(rows, dtype=np.int32).reshape(-1, 3)
        made |= {f"{prefix}tile_{name}": table[:, i] for i, name in enumerate(("chain", "first", "count"))}
    return made


def _attention(
    sent: Sent, slots: Tensor, geometry: Geometry, prefix: str, positions: Tensor, tile: int
) -> AttentionPlan:
    num_tiles = len(sent[f"{prefix}tile_chain"])
    return AttentionPlan(
        buffer=slots,
        slots=slots,
        key_positions=sent.get("key_positions"),
        starts=sent["starts"],
        lengths=sent["lengths"],
        positions=positions,
        tile_chain=sent[f"{prefix}tile_chain"],
        tile_first=sent[f"{prefix}tile_first"],
        tile_count=sent[f"{prefix}tile_count"],
        tile=tile,
        num_splits=_num_splits(num_tiles * geometry.num_kv_heads, len(slots)),
    )


def _num_splits(num_programs: int, num_keys: int) -> int:
    """Parts of the keys, so that all multiprocessors work and each part is worth a program."""
    return max(1, min(NUM_PROGRAMS // max(num_programs, 1), num_keys // MIN_SPLIT_KEYS, 64))
