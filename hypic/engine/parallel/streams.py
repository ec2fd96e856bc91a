"""Side streams: what carries and checks entries on a GPU runs beside the model, never in its stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """The calling thread's own stream on a GPU; nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


@dataclass(frozen=True)
class Made:
    """Bytes that were written in one stream and will be read in another."""

    data: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def here(cls, data: Tensor) -> Made:
        """Written in the current stream."""
        if data.device.type != "cuda":
            return cls(data, None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(data.device))
        return cls(data, event)

    def taken(self) -> Tensor:
        """For use in the current stream, which waits for what wrote them."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.data.device)
            stream.wait_event(self.event)
            self.data.record_stream(stream)
        return self.data
