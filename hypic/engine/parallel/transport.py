"""How entries' bytes travel between two workers, once its ``Parcel`` message has announced them.

A *carrier* belongs to one connection between one pair of processes and goes with it: ``socket`` sends the bytes behind
the message (always there, and what is left when another carrier breaks), ``gloo`` and ``nccl`` (``group.py``) hand them
to a ``torch.distributed`` group of just these two, ``ipc`` (``device_memory.py``) lets a worker on the same GPU read
them where they lie. One thread of a side sends and one receives, so bytes come in the order of their messages.
"""

from __future__ import annotations

import platform
from typing import Protocol

import torch
from torch import Tensor

from hypic.engine.parallel.messages import Parcel
from hypic.engine.parallel.wire import Wire

NAMES = ("auto", "socket", "gloo", "nccl", "ipc")


class Transport(Protocol):
    """Carries bytes one way or the other over a pair's connection."""

    @property
    def name(self) -> str: ...

    def send(self, wire: Wire, parcel: Parcel, data: Tensor) -> None:
        """The message and its bytes, ``[n]`` of uint8; they may be given up when this returns.

        Raises:
            WorkerLost: the other side is gone.
        """

    def receive(self, wire: Wire, parcel: Parcel, device: torch.device) -> Tensor:
        """The bytes that ``parcel`` announced, ``[n]`` of uint8 on ``device``.

        Raises:
            WorkerLost: the other side is gone.
        """

    def close(self) -> None:
        """Wakes whoever waits in it."""


class SocketTransport:
    """Bytes on the connection itself; from and to a GPU through the host's memory."""

    name = "socket"

    def send(self, wire: Wire, parcel: Parcel, data: Tensor) -> None:
        wire.send(parcel, data.cpu())

    def receive(self, wire: Wire, parcel: Parcel, device: torch.device) -> Tensor:
        return wire.receive_bytes(parcel.num_bytes).to(device)

    def close(self) -> None:
        return


def choose(wanted: str, mine: str, theirs: str, is_same_host: bool) -> str:
    """The carrier between two devices, given as ``device_name`` names them."""
    if wanted != "auto":
        return wanted
    if mine == theirs == "cpu":
        return "gloo"
    if "cpu" in (mine, theirs):
        return "socket"
    return "ipc" if mine == theirs and is_same_host else "nccl" if mine != theirs else "socket"


def device_name(device: torch.device) -> str:
    """``cpu``, or a GPU by its own identity, the same in every process that sees it."""
    return "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def device_kind(device: torch.device) -> str:
    """A GPU's model, or this host's processors with as many threads: what is of one kind should be equally fast."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"cpu of {platform.node()}, {torch.get_num_threads()} threads"
