"""Token slots of running requests on the device, one row each: so that a step sends only what is new of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hypic.engine.segment import Slots


class SlotTable:
    """``flat [num_rows * max_context]``, int32; a request's keys lie from ``row * max_context`` on, by position."""

    def __init__(self, num_rows: int, max_context: int, device: torch.device) -> None:
        self.max_context = max_context
        self.flat = torch.zeros(
            num_rows * max_context if device.type == "cuda" else 0, dtype=torch.int32, device=device
        )
        self._free = list(range(num_rows - 1, -1, -1))
        self._sent = np.zeros(num_rows, dtype=np.int64)

    def take(self) -> int:
        """A row of which nothing was sent yet; there is one for every request that may run."""
        row = self._free.pop()
        self._sent[row] = 0
        return row

    def drop(self, row: int) -> None:
        assert row not in self._free, f"row {row} is freed twice"
        self._free.append(row)

    def start(self, row: int) -> int:
        return row * self.max_context

    def send(self, rows: Sequence[int], contexts: Sequence[Slots]) -> None:
        """Bring rows up to their contexts; what was sent before does not change."""
        places, values = [], []
        for row, context in zip(rows, contexts, strict=True):
            first, self._sent[row] = self._sent[row], max(self._sent[row], len(context))
            if first < len(context):
                places.append(np.arange(first, len(context)) + self.start(row))
                values.append(context[first:])
        if places:
            both = torch.from_numpy(np.stack([np.concatenate(places), np.concatenate(values)]).astype(np.int64))
            both = both.pin_memory() if self.flat.is_cuda else both  # a copy from other memory would be waited for
            there, slots = both.to(self.flat.device, non_blocking=True).unbind(0)
            self.flat.index_copy_(0, there, slots.int())
