"""Side streams: what carries and checks entries on a GPU runs beside the model, never in its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """The calling thread's own stream on a GPU; nothing on the CPU.

    What it launches is little and waited for, so it goes before the model's kernels that have not begun.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):  # type: ignore[no-untyped-call]
        yield


@dataclass(frozen=True)
class Moment:
    """A point in one stream of a device, for which another stream can wait; nothing on the CPU."""

    device: torch.device
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, device: torch.device) -> Moment:
        """In the current stream."""
        if device.type != "cuda":
            return cls(device, None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return cls(device, event)

    def wait(self) -> None:
        """The current stream goes on when it has been reached."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def reached(self, timeout_s: float) -> bool:
        """Whether it has been reached, waiting for it that long; a wait that can be given up, as others cannot."""
        deadline_s = time.monotonic() + timeout_s
        while self.event is not None and not self.event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline_s:
                return False
            time.sleep(1e-4)
        return True


@dataclass(frozen=True)
class Made:
    """Bytes that were written in one stream and will be read in another."""

    data: Tensor
    moment: Moment

    @classmethod
    def here(cls, data: Tensor) -> Made:
        """Written in the current stream."""
        return cls(data, Moment.now(data.device))

    def taken(self) -> Tensor:
        """For use in the current stream, which waits for what wrote them."""
        self.moment.wait()
        if self.data.device.type == "cuda":
            self.data.record_stream(torch.cuda.current_stream(self.data.device))
        return self.data
