"""Evaluates a chain of live text and segments, layer by layer and token by token.

Canonical encoding: a segment is run alone, from position 0, zero states and no convolution history.
Of its interior (all but the seam) are kept, per linear layer, the affine map ``(T, B)`` and the last
W-1 raw convolution inputs; per attention layer, unrotated keys and values. Answering: rows (live text
and seams) run in context, interiors act through what was kept. Full recompute is a chain of one row.
Nothing is rounded and nothing is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.reference.algebra import probe
from tests.reference.chain import (
    SOUND,
    AttentionEnd,
    AttentionEntry,
    Chain,
    Compose,
    Encoded,
    Faults,
    How,
    Interior,
    LinearEnd,
    LinearEntry,
    Live,
    Result,
    Row,
    SegmentLink,
)
from tests.reference.checkpoint import load
from tests.reference.mixers import rms
from tests.reference.mixing import last, mix


class Reference:
    """A checkpoint folder, read by itself in float64, that evaluates chains.

    Raises:
        ValueError: the model type or its rotary embedding is not known here.
    """

    def __init__(self, folder: str | Path) -> None:
        self.network = load(Path(folder))

    @torch.no_grad()
    def evaluate(
        self,
        links: Sequence[Live | SegmentLink],
        *,
        compose: Compose = "transition",
        rotate: bool = True,
        faults: Faults = SOUND,
        primer: Sequence[int] = (),
    ) -> Result:
        """What the chain's rows give, from scratch.

        ``compose`` and ``rotate`` are ablations: ``addition`` takes an interior's T as the identity, ``last``
        as zero; ``rotate=False`` leaves an interior's keys at their local positions. Segments are encoded behind
        ``primer``, which is no part of the chain.
        """
        return self._forward(self._chain(links, faults.shift_seam_by, tuple(primer)), How(compose, rotate, faults))

    def full(self, ids: Sequence[int]) -> Result:
        """Full recompute: the chain of one row."""
        return self.evaluate([Live(ids)])

    @torch.no_grad()
    def encode(self, ids: Sequence[int], start: int) -> Encoded:
        """The interior, from token ``start`` on, of a segment that is run alone."""
        alone = self._forward([Row(tuple(ids), 0)], How())
        return Encoded(tuple(_keep(end, start) for end in alone.layers), start, len(ids) - start)

    def _chain(self, links: Sequence[Live | SegmentLink], shift: int, primer: tuple[int, ...]) -> list[Row | Interior]:
        chain: list[Row | Interior] = []
        entries: dict[tuple[tuple[int, ...], int, int], Encoded] = {}
        position = 0
        for link in links:
            ids = tuple(link.ids)
            before = primer if isinstance(link, Live) or link.primer is None else link.primer
            done = 0
            for start, stop in link.interiors if isinstance(link, SegmentLink) else ():
                if ids[done:start]:
                    chain.append(Row(ids[done:start], position + done))
                if ids[start:stop]:
                    first = min(max(start + shift, 0), stop)
                    key = (before + ids[:stop], len(before), first)
                    entries[key] = entries.get(key) or self.encode(key[0], len(before) + first)
                    chain.append(Interior(entries[key], position - len(before)))
                done = max(done, stop)
            if ids[done:]:
                chain.append(Row(ids[done:], position + done))
            position += len(ids)
        return chain

    def _forward(self, chain: Chain, how: How) -> Result:
        net, rows = self.network, [link for link in chain if isinstance(link, Row)]
        ids = torch.tensor([i for row in rows for i in row.ids], dtype=torch.long)
        positions = torch.tensor([row.position + j for row in rows for j in range(len(row.ids))], dtype=torch.long)
        x, ends = net.embedding[ids], []
        for idx, block in enumerate(net.blocks):
            normed = block.norm(x, second=False)
            mixed, end = mix(block.mixer, normed, chain, idx, how)
            x = block.add(x, normed, mixed, second=False)
            normed = block.norm(x, second=True)
            x = block.add(x, normed, block.feed_forward(normed), second=True)
            ends.append(end)
        return Result((rms(x, net.eps) * net.final_norm) @ net.head.T, positions, tuple(ends))


def _keep(end: LinearEnd | AttentionEnd, start: int) -> LinearEntry | AttentionEntry:
    if isinstance(end, AttentionEnd):
        return AttentionEntry(end.row_keys[start:], end.row_values[start:])
    transition, end_state = probe(end.row_inputs[start:])
    # A run's own conv tail is as long as the convolution's reach, so it says how much an interior may leave.
    return LinearEntry(transition, end_state, last(end.row_raw[start:], len(end.conv_tail)))
