"""Token slots of running requests on the device, one row each: so that a step sends only what is new of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.engine.segment import Slots


class SlotTable:
    """``flat [num_rows * max_context + 1]``, int32; a request's keys lie from ``row * max_context`` on, by position.
    The last place is spare: padding writes there."""

    def __init__(self, num_rows: int, max_context: int, device: torch.device) -> None:
        self.max_context, self.spare_place = max_context, num_rows * max_context
        num_places = self.spare_place + 1 if device.type == "cuda" else 0
        self.flat = torch.zeros(num_places, dtype=torch.int32, device=device)
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_sent = [0] * num_rows

    def take(self) -> int:
        """A row of which nothing was sent yet; there is one for every request that may run."""
        row = self._free.pop()
        self._num_sent[row] = 0
        return row

    def drop(self, row: int) -> None:
        assert row not in self._free, f"row {row} is freed twice"
        self._free.append(row)

    def start(self, row: int) -> int:
        return row * self.max_context

    def send(self, row: int, context: Slots, num_own: int) -> None:
        """Bring a row up to its context, whose last ``num_own`` slots the step itself writes (``write``); what was sent
        before does not change."""
        first, stop = self._num_sent[row], len(context) - num_own
        if first < stop:
            staged = torch.empty(stop - first, dtype=torch.int32, pin_memory=self.flat.is_cuda)
            staged.numpy()[:] = context[first:stop]
            start = self.start(row)
            self.flat[start + first : start + stop].copy_(staged, non_blocking=True)
        self._num_sent[row] = max(first, len(context))  # not before: without memory for it the step may come again

    def write(self, places: Tensor, slots: Tensor) -> None:
        """``slots [n]`` at ``places [n]`` of the table, as a part of a step."""
        self.flat.index_copy_(0, places.long(), slots)
