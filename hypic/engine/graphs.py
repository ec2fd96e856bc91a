"""Recorded steps (CUDA graphs): small steps whose launches would cost the host more than the device.

A step is padded to the next bucket's lengths, its numbers are sent into the buffer the recorded launches read, and the
whole forward is one launch. Steps that encode, or fit no bucket, are run as they are. Everything is recorded before the
engine is ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.engine.batch import is_decode
from hypic.engine.chain import Chain, RowLink
from hypic.engine.kernel_batch import Geometry, Room, batch_of, packed
from hypic.engine.kernel_buffer import Bucket, Sent, Spare, fitted, padding
from hypic.engine.kernel_tiles import Tiling
from hypic.engine.models import Model
from hypic.engine.pool import Pool
from hypic.engine.read_back import packed as packed_bytes
from hypic.engine.sampler import likeliest

logger = logging.getLogger("hypic")
WARM_TOKENS = (32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
WARM_CHAINS = (1, 8)
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNK = 16
SPARE_WRITES = 2
TYPICAL_SEAM = 8


def decode_bucket(num_tokens: int, tiling: Tiling) -> Bucket:
    """Every chain is one token."""
    return Bucket(
        tokens=num_tokens,
        chunks=num_tokens,
        chunk_size=CHUNK,
        elements=num_tokens,
        chains=num_tokens,
        writes=num_tokens,
        interiors=0,
        outputs=num_tokens,
        tiles=num_tokens,
        parts=tiling.most_parts(num_tokens, 1),
        final_parts=tiling.most_parts(num_tokens, 1),
    )


def warm_bucket(num_tokens: int, num_chains: int, tiling: Tiling, max_context: int) -> Bucket:
    """Rows of a seam's length and longer ones, and as many interiors.

    Rows of at least ``TYPICAL_SEAM`` tokens, half a chunk, fill half of their chunks or more, but for each row's last.
    """
    num_rows = num_tokens // TYPICAL_SEAM + 2 * num_chains
    chunks = num_tokens // TYPICAL_SEAM + num_chains + SPARE_WRITES
    tiles = num_tokens // tiling.short + num_chains
    return Bucket(
        tokens=num_tokens,
        chunks=chunks,
        chunk_size=CHUNK,
        elements=chunks + num_rows,
        chains=num_chains,
        writes=num_chains + SPARE_WRITES,
        interiors=num_rows,
        outputs=chunks + SPARE_WRITES,
        tiles=tiles,
        parts=tiling.most_parts(tiles, tiling.short),
        final_parts=tiling.most_parts(num_chains, 1),
        keys=tiling.most_keys(num_chains, max_context),
    )


class Outputs(NamedTuple):
    """What a recorded step leaves, all of it overwritten by the next one: ``logits [R, vocab]``, ``is_finite [N]`` of
    tokens, the ``ids [R]`` that are likeliest and whether they are ``finite [R]``; and the last three ``together``, for
    one read. Rows of padding stand behind all others."""

    logits: Tensor
    is_finite: Tensor
    ids: Tensor
    finite: Tensor
    together: Tensor


@dataclass(frozen=True)
class Recorded:
    """One graph: the buffer it reads, and what it leaves."""

    bucket: Bucket
    sent: Sent
    graph: torch.cuda.CUDAGraph
    outputs: Outputs


@dataclass
class Graphs:
    """Recorded steps of one model and pool, smallest first."""

    model: Model
    pool: Pool
    geometry: Geometry
    decodes: list[Recorded] = field(default_factory=list)
    warm: list[Recorded] = field(default_factory=list)
    num_replays: int = 0

    def record(self, max_running: int, max_step_tokens: int) -> None:
        """Record all buckets, largest first, so that smaller ones find their memory; waits for the device."""
        started, memory = time.perf_counter(), torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self.pool.device)  # type: ignore[no-untyped-call]
        tiling, context = self.geometry.tiling, self.pool.max_context
        decodes = [decode_bucket(n, tiling) for n in DECODE_TOKENS if n < 2 * max_running]
        tokens = [n for n in WARM_TOKENS if n <= max_step_tokens]
        warm = [warm_bucket(n, c, tiling, context) for n in tokens for c in WARM_CHAINS if c <= max(1, max_running)]
        for buckets, kept in ((warm, self.warm), (decodes, self.decodes)):
            for bucket in sorted(buckets, key=lambda b: (b.tokens, b.chains), reverse=True):
                kept.insert(0, self._record(bucket, kept is self.decodes, memory, stream))
        logger.info("%d steps recorded in %.1f s", len(self.warm + self.decodes), time.perf_counter() - started)

    def run(self, chains: Sequence[Chain], ids: Tensor | None = None) -> Outputs | None:
        """What the step leaves, its logits without padding, or ``None`` where no bucket fits. ``ids [N]`` are its
        tokens where only the device knows them."""
        if not all(_is_recordable(chain) for chain in chains):
            return None
        rows = [chain.table_row for chain in chains if chain.table_row is not None]
        made = packed(chains, self.geometry, [self.pool.table.start(row) for row in rows])
        kept = self.decodes if is_decode(chains) else self.warm
        recorded = next((r for r in kept if r.bucket.holds(made.found, made.num_outputs)), None)
        if recorded is None:
            return None
        if self.geometry.paged:
            for row, chain in zip(rows, chains, strict=True):
                self.pool.table.send(row, chain.context, _num_last(chain))
        recorded.sent.write(fitted(made.found, recorded.bucket))
        if ids is not None:
            recorded.sent["ids"][: len(ids)].copy_(ids)
        recorded.graph.replay()
        self.num_replays += 1
        return recorded.outputs._replace(logits=recorded.outputs.logits[: len(made.found["finals"])])

    def _buffer(self, bucket: Bucket, decodes: bool) -> Sent:
        """A bucket's buffer: padding, and before it a step to record with."""
        example = packed([self._example(decodes)], self.geometry, [0]).found
        spare = Spare(self.pool.spare_token, self.pool.spare_state, self.pool.table.spare_place)
        sent = Sent(padding(example, bucket, spare), self.pool.device)
        sent.write(fitted(example, bucket))
        return sent

    def _record(self, bucket: Bucket, decodes: bool, memory: Any, stream: torch.cuda.Stream) -> Recorded:
        """``stream`` is of the pool's device: without one, torch records on the current device, whichever that is."""
        sent = self._buffer(bucket, decodes)
        stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(stream):
            self._forward(sent, bucket, decodes)  # compiles kernels and fills their tables
        torch.cuda.current_stream(self.pool.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream):
            outputs = self._forward(sent, bucket, decodes)
        return Recorded(bucket, sent, graph, outputs)

    def _forward(self, sent: Sent, bucket: Bucket, decodes: bool) -> Outputs:
        slots = self.pool.table.flat if self.geometry.paged else None
        if slots is not None:
            self.pool.table.write(sent["table_places"], sent["kv_slots"])
        room = Room(1 if decodes else self.geometry.tiling.short, bucket.keys, is_recorded=True)
        batch = batch_of(sent, bucket.outputs, self.geometry, self.pool, slots, room)
        hidden, finite = self.model.forward_final(batch.standing_in(batch.final, (), (), decodes), self.pool)
        logits = self.model.logits(hidden)
        found = likeliest(logits)
        return Outputs(logits, finite, *found, together=packed_bytes([finite, *found]))

    def _example(self, decodes: bool) -> Chain:
        """A step that touches nothing but spare slots."""
        count = 1 if decodes else 2
        slots = np.full(count, self.pool.spare_token, dtype=np.int64)
        row = RowLink([0] * count, 0, slots)
        return Chain([row], slots, 0, self.pool.spare_state, wants_logits=True, table_row=0)


def _num_last(chain: Chain) -> int:
    """Tokens of the chain's last row."""
    return next(len(link.ids) for link in reversed(chain.links) if isinstance(link, RowLink))


def _is_recordable(chain: Chain) -> bool:
    """A request's, that encodes nothing and turns its keys by their places."""
    is_folding = any(isinstance(link, RowLink) and link.fold is not None for link in chain.links)
    return chain.table_row is not None and chain.key_positions is None and not is_folding
