"""What a step gives the host: tensors of any type, on their way in one copy and waited for once.

Every read of a device ends in a wait for it, so a step has one: whether its tokens are finite, what was chosen, and
log probabilities where they are asked for travel together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Landing:
    """Where reads arrive, in turn: pinned memory and events, which take longer to make than to use. What a read gave
    is overwritten ``NUM_READS`` reads later. Who waits for a read keeps a processor busy, since that is told sooner,
    unless ``sleeps``."""

    NUM_READS = 2

    def __init__(self, sleeps: bool = False) -> None:
        self._sleeps = sleeps
        self._places: list[tuple[Tensor, torch.cuda.Event]] = []

    def next(self, num_bytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """Memory of the host, ``[num_bytes]``, and an event."""
        if len(self._places) < self.NUM_READS:
            self._places.insert(0, _place(num_bytes, self._sleeps))  # before those that are in use
        host, arrived = self._places.pop(0)
        if len(host) < num_bytes:
            host, arrived = _place(num_bytes, self._sleeps)
        self._places.append((host, arrived))
        return host[:num_bytes], arrived


def _place(num_bytes: int, sleeps: bool) -> tuple[Tensor, torch.cuda.Event]:
    host = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
    return host, torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]


class ReadBack:
    """``tensors`` of one device, read by the host later. The host goes on until ``wait``.

    ``together`` are the tensors ``packed`` already, which the next step may overwrite; ``landing`` gives memory that is
    there already.
    """

    @torch.inference_mode()
    def __init__(
        self, tensors: Sequence[Tensor], landing: Landing | None = None, together: Tensor | None = None
    ) -> None:
        self._tensors = list(tensors)
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            together = packed(self._tensors) if together is None else together
            self._host, self._arrived = (landing or Landing()).next(len(together))
            self._host.copy_(together, non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(together.device))
        elif together is not None:
            self._host = together.clone()

    @property
    def has_come(self) -> bool:
        """Whether ``wait`` would not wait."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once the device has come so far."""
        if self._host is None:
            return self._tensors
        if self._arrived is not None:
            self._arrived.synchronize()
        return unpacked(self._host, self._tensors)


def _order(tensors: Sequence[Tensor]) -> list[int]:
    """Widest numbers first, so that each tensor begins at a multiple of its own numbers' size."""
    return sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, ``[n]``."""
    return torch.cat([tensors[number].reshape(-1).view(torch.uint8) for number in _order(tensors)])


def unpacked(host: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the types and shapes of ``like``, over the bytes that ``packed`` made of them."""
    found, start = list(like), 0
    for number in _order(like):
        tensor = like[number]
        stop = start + tensor.numel() * tensor.element_size()
        found[number] = host[start:stop].view(tensor.dtype).view(tensor.shape)
        start = stop
    return found
