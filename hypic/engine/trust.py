"""Whether a peer computes what this worker computes: it is asked for an entry that is known, before any other is used.

Digests show damage on the way. A worker with other weights, or whose memory is broken, sends wrong numbers with right
digests: only a comparison shows that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from hypic.engine.parallel.view import View
from hypic.engine.payload import Canary, difference, same_within
from hypic.engine.store.image import EntryImage

logger = logging.getLogger("hypic")
# How often a peer failed that must never be used.
NEVER = 1_000_000
# What a pending canary has for its attempt.
CANARY = -1
# What a canary is taken to last: no request waits for it, so a worker that has just started is given time.
CANARY_S = 8.0


@dataclass(frozen=True)
class Trust:
    """The states of peers in ``view`` as far as trust goes; ``due`` and ``settle`` are called under its lock.

    ``report`` is told of a peer that is not to be used: rank, generation, how often it failed, why. ``kind`` is that of
    this worker's device.
    """

    canary: Canary
    dtype: torch.dtype
    drop_below: float
    view: View
    report: Callable[[int, int, int, str], None]
    kind: str = ""

    def due(self, now: float, called: Container[int]) -> list[tuple[int, int]]:
        """The peers that are to be asked for the canary now, of those that are called; they count as asked."""
        found = [peer for peer in self.view.unknown(now) if peer.id[0] in called]
        for peer in found:
            peer.state = "asked"
        return [peer.id for peer in found]

    def apart(self, image: EntryImage) -> float:
        """How far a peer's entry of the canary is from this worker's own; takes its time."""
        return difference(image, self.canary.image, self.drop_below)

    def settle(self, peer: tuple[int, int], apart: float) -> None:
        """Whether a peer is to be used whose entry is so far from this worker's own: if it is that within rounding, and
        for deterministic requests if it is that bit by bit."""
        is_same, found = apart <= same_within(self.dtype), self.view.get(*peer)
        if found is not None:
            found.is_exact = apart == 0.0 and found.hello.kind == self.kind
        self.view.becomes(peer, "trusted" if is_same else "refused")
        if not is_same:
            reason = f"its entry of a known text differs from this worker's by {apart:.2g}; it is not used"
            logger.error("worker %d: %s", peer[0], reason)
            self.report(*peer, NEVER, reason)
