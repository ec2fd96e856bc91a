"""Entries between workers that share one GPU: the receiver copies them from where they lie (CUDA IPC), nothing is sent.

The sender's memory is kept by torch until the receiver has let go of it. Handles travel as plain bytes and numbers; no
pickle is involved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypic.engine.parallel.messages import Handle, Parcel
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost


class DeviceMemoryTransport:
    """See the module's docstring."""

    name = "ipc"

    def send(self, wire: Wire, parcel: Parcel, data: Tensor) -> None:
        torch.cuda.current_stream(data.device).synchronize()
        wire.send_together([parcel, handle_of(data)])

    def receive(self, wire: Wire, parcel: Parcel, device: torch.device) -> Tensor:
        message = wire.receive()
        if not isinstance(message, Handle):
            raise WorkerLost(f"a worker sent {type(message).__name__} where a handle belongs; it is given up.")
        try:
            shared = opened(message, device)
        except RuntimeError as error:
            raise WorkerLost(f"a worker's memory cannot be read ({str(error)[:120]}).") from error
        copied = shared[: parcel.num_bytes].clone()
        torch.cuda.current_stream(device).synchronize()
        return copied

    def close(self) -> None:
        return


def handle_of(data: Tensor) -> Handle:
    """For another process to find ``data [n]``, uint8 on a GPU."""
    _, memory, size, offset, counter, counter_offset, event, needs_event = _shared(data)
    return Handle(
        memory=memory.hex(),
        size=size,
        offset=offset,
        counter=counter.hex(),
        counter_offset=counter_offset,
        event=event.hex(),
        needs_event=bool(needs_event),
        start=int(data.storage_offset()),
    )


def _shared(data: Tensor) -> Any:
    return data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]


def opened(handle: Handle, device: torch.device) -> Tensor:
    """The bytes behind a handle, as another process wrote them; dropping the tensor lets go of them."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        bytes.fromhex(handle.memory),
        handle.size,
        handle.offset,
        bytes.fromhex(handle.counter),
        handle.counter_offset,
        bytes.fromhex(handle.event),
        handle.needs_event,
    )
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (handle.size,), (1,))[handle.start :]
