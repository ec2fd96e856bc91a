"""Entries over ``torch.distributed``: Gloo between CPUs, NCCL between GPUs.

A group of many processes does not survive the death of one. So there is none: every connection between two workers
has a group of two, made when they connect and thrown away with the connection. A worker that dies breaks the groups it
was in and no other, and one that comes back is met with new groups, under its new generation.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hypic.engine.parallel.messages import Parcel
from hypic.engine.parallel.streams import Moment, side_stream
from hypic.engine.parallel.wire import Wire
from hypic.errors import WorkerLost

# Much of it has no types of its own.
dist: Any = torch.distributed
MEETING_S = 20.0
# A large transfer takes other ways than a small one, which are made at the first.
WARMING_BYTES = 2**26
LONGEST_S = 60.0


def is_available(name: str) -> bool:
    if not dist.is_available():
        return False
    return dist.is_gloo_available() if name == "gloo" else dist.is_nccl_available() and torch.cuda.is_available()


class Meeting:
    """Where two processes find each other: a private folder on one host, a port between hosts.

    The one that connects opens it, with nothing but its own address; the other finds it under ``place``.

    Raises:
        WorkerLost: it cannot be opened or found.
    """

    def __init__(self, own_host: str, place: str = "") -> None:
        self._own_host, self._rank = own_host, 1 if place else 0
        self._folder: str | None = None
        limit = timedelta(seconds=MEETING_S)
        try:
            if not place and own_host.startswith("127."):
                self._folder = tempfile.mkdtemp(prefix="hypic-")
                place = f"file:{self._folder}/meeting"
            kind, _, rest = place.partition(":")
            if kind == "file":
                self._store: Any = dist.FileStore(rest, 2)
                self._store.set_timeout(limit)
            else:
                host, _, port = rest.rpartition(":")
                self._store = dist.TCPStore(
                    host or own_host, int(port or 0), 2, not rest, timeout=limit, wait_for_workers=False
                )
                place = place or f"tcp:{own_host}:{self._store.port}"
        except (RuntimeError, ValueError, OSError) as error:
            raise WorkerLost(f"two workers have no place to meet ({str(error)[:120]}).") from error
        self.place = place

    def join(self, name: str, device: torch.device) -> GroupTransport:
        """The group of the two, once both have called this.

        Raises:
            WorkerLost: the other side did not come.
        """
        try:
            group = self._nccl(device) if name == "nccl" else self._gloo()
        except RuntimeError as error:
            raise WorkerLost(f"two workers could not meet over {name} ({str(error)[:120]}).") from error
        finally:
            self.close()
        return GroupTransport(name, group, 1 - self._rank, device)

    def close(self) -> None:
        """Nobody comes any more. Who has met needs the folder no longer: it goes at once, not when a process ends."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _gloo(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_host)]
        options._timeout = timedelta(seconds=LONGEST_S)
        group = dist.ProcessGroupGloo(self._store, self._rank, 2, options)
        self._probe(group, torch.device("cpu"))
        return group

    def _nccl(self, device: torch.device) -> Any:
        # A transfer that never ends is ended by whoever waits for it; torch's own watch would end the whole process.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=LONGEST_S)
        options.is_high_priority_stream = True  # as the streams that wait for it
        with side_stream(device):
            group = dist.ProcessGroupNCCL(self._store, self._rank, 2, options)
            self._probe(group, device)
        return group

    def _probe(self, group: Any, device: torch.device) -> None:
        """A byte each way, and between GPUs as much as an entry: both have met, and what the first transfers make is
        made, on no request's path and before the link's speed is measured."""
        peer = 1 - self._rank
        for num_bytes in (1, WARMING_BYTES) if device.type == "cuda" else (1,):
            probe = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            for sender in (0, 1):
                work = group.send([probe], peer, 0) if self._rank == sender else group.recv([probe], peer, 0)
                work.wait()
                _finish(device, MEETING_S, group)


class GroupTransport:
    """Bytes over a group of two."""

    def __init__(self, name: str, group: Any, peer: int, device: torch.device) -> None:
        self.name, self._group, self._peer, self._device = name, group, peer, device

    def send(self, wire: Wire, parcel: Parcel, data: Tensor) -> None:
        wire.send(parcel)
        try:
            self._group.send([data], self._peer, 0).wait()
            _finish(data.device, LONGEST_S, self._group)
        except RuntimeError as error:
            raise WorkerLost(f"an entry could not be sent over {self.name} ({str(error)[:120]}).") from error

    def receive(self, wire: Wire, parcel: Parcel, device: torch.device) -> Tensor:
        buffer = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=self._device)
        try:
            self._group.recv([buffer], self._peer, 0).wait()
            _finish(self._device, LONGEST_S, self._group)
        except RuntimeError as error:
            raise WorkerLost(f"an entry did not come over {self.name} ({str(error)[:120]}).") from error
        return buffer.to(device)

    def close(self) -> None:
        with suppress(RuntimeError):  # broken already
            self._group.abort()


def _finish(device: torch.device, timeout_s: float, group: Any) -> None:
    """Until a transfer is done, which on a GPU has only been begun: ``wait`` holds up the stream, not the host.

    Raises:
        RuntimeError: it takes too long; the group is of no use any more.
    """
    if not Moment.now(device).reached(timeout_s):
        group.abort()  # or it would hold up the stream for ever
        raise RuntimeError(f"a transfer took more than {timeout_s:.0f} s")
