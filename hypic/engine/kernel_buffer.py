"""Arrays of a step, padded to the lengths of a recorded one and sent to the device in one copy.

Padding does no harm: rows of no token, chains of no element, writes to the pool's spare slots. So a recorded graph can
be run again with other contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hypic.engine.kernel_arrays import Arrays, Ints
from hypic_kernels.attention import NO_TILE
from hypic_kernels.conv import NOTHING

TOKEN_ARRAYS = ("ids", "positions", "kv_slots", "token_chunks", "conv_sources", "table_places")
CHAIN_ARRAYS = (
    *("finals", "initial_slots", "final_slots", "starts", "lengths", "final_positions"),
    *("final_tile_chain", "final_tile_first", "final_tile_count", "final_tile_part", "final_tile_parts"),
)
TILE_ARRAYS = ("tile_chain", "tile_first", "tile_count", "tile_part", "tile_parts")
PART_ARRAYS = ("part_tile", "part_begin", "part_end")
NOWHERE = -1
ALIGNED = 4  # numbers: Triton compiles anew for a pointer that is not a multiple of 16 bytes


@dataclass(frozen=True)
class Spare:
    """Where padding writes: a token slot, a state slot and a place in the table of token slots that nobody reads."""

    token: int
    state: int
    place: int


@dataclass(frozen=True)
class Bucket:
    """Lengths that a recorded step's arrays are padded to; ``keys`` that there is room for once they are turned."""

    tokens: int
    chunks: int
    chunk_size: int
    elements: int
    chains: int
    writes: int
    interiors: int
    outputs: int
    tiles: int
    parts: int
    final_parts: int
    keys: int = 0

    def holds(self, found: Arrays, num_outputs: int) -> bool:
        """Whether a step fits: no array is longer than its capacity."""
        fits = all(len(values) <= self.lengths[name] for name, values in found.items())
        return fits and num_outputs <= self.outputs and found["chunks"].shape[1] == self.chunk_size

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        tokens = dict.fromkeys(TOKEN_ARRAYS, self.tokens)
        writes = dict.fromkeys(("write_slots", "write_places", "conv_write_slots", "conv_write_sources"), self.writes)
        chains = dict.fromkeys(CHAIN_ARRAYS, self.chains)
        interiors = ("interior_states", "interior_transitions", "interior_origins")
        return {
            **tokens,
            **writes,
            **chains,
            **dict.fromkeys(interiors, self.interiors),
            **dict.fromkeys(TILE_ARRAYS, self.tiles),
            **dict.fromkeys(PART_ARRAYS, self.parts),
            **dict.fromkeys((f"final_{name}" for name in PART_ARRAYS), self.final_parts),
            "chunks": self.chunks,
            **dict.fromkeys(("elements", "element_turns", "slotted_elements"), self.elements),
            **dict.fromkeys(("copies_from", "copies_to"), self.writes - self.chains),
            "cu_elements": self.chains + 1,
        }


def padding(found: Arrays, bucket: Bucket, spare: Spare) -> dict[str, Ints]:
    """The arrays of a step of nothing at a bucket's lengths; ``found`` is any step's, for names and widths."""
    fills = {
        "kv_slots": spare.token,
        "table_places": spare.place,
        "conv_sources": NOTHING,
        "conv_write_sources": NOTHING,
        "conv_write_slots": NOWHERE,
        **dict.fromkeys(("write_slots", "copies_from", "copies_to"), spare.state),
        "final_slots": NOWHERE,
        "chunks": bucket.tokens,
        "part_tile": NO_TILE,
        "final_part_tile": NO_TILE,
    }
    shapes = {name: (bucket.lengths[name], *values.shape[1:]) for name, values in found.items()}
    return {name: np.full(shape, fills.get(name, 0), dtype=np.int32) for name, shape in shapes.items()}


def fitted(found: Arrays, bucket: Bucket) -> dict[str, Ints]:
    """A step's arrays as they stand before a bucket's padding, which differs in what it is counted from."""
    chunks, ends = found["chunks"], np.full(bucket.chains + 1, found["cu_elements"][-1], dtype=np.int32)
    ends[: len(found["cu_elements"])] = found["cu_elements"]
    return {
        **found,
        "chunks": np.where(chunks == len(found["ids"]), bucket.tokens, chunks),
        "cu_elements": ends,
        "write_places": resolved(found["write_places"], bucket.outputs),
    }


def resolved(places: Ints, num_outputs: int) -> Ints:
    """Places of states in ``[before | final]``, given those of finals as ``-1 - chain``."""
    return np.where(places < 0, num_outputs - 1 - places, places).astype(np.int32)


class _Stage:
    """Memory of the host that arrays are sent from: ``numbers``, to be filled once they were ``sent`` last."""

    def __init__(self, total: int, device: torch.device) -> None:
        self.host = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.numbers = self.host.numpy()
        self._sent: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, target: Tensor) -> None:
        target.copy_(self.host, non_blocking=True)
        if target.is_cuda:
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record(torch.cuda.current_stream(target.device))


class Sent:
    """Arrays on a device, by name: views of one buffer, which later arrays of the same lengths may overwrite. They are
    sent from two places in turn, so that a step can be sent while the one before is under way."""

    def __init__(self, found: Arrays, device: torch.device) -> None:
        starts, total = {}, 0
        for name, values in found.items():
            starts[name] = total
            total += -(-values.size // ALIGNED) * ALIGNED
        self._starts, self._stages = starts, [_Stage(total, device)]
        self._device = torch.empty(total, dtype=torch.int32, device=device)
        self._shapes = {name: values.shape for name, values in found.items()}
        self._fill(found, self._stages[0].numbers)
        self._device.copy_(self._stages[0].host, non_blocking=True)

    @cached_property
    def _first(self) -> Ints:
        return self._stages[0].numbers.copy()

    def write(self, found: Arrays) -> None:
        """Send contents, behind the step that uses the former ones; what is shorter than the first keeps their end."""
        first, stage = self._first, self._next_stage()
        stage.wait()
        stage.numbers[:] = first
        self._fill(found, stage.numbers)
        stage.send(self._device)

    def _next_stage(self) -> _Stage:
        if len(self._stages) == 1:
            self._stages.append(_Stage(len(self._device), self._device.device))
        self._stages.reverse()
        return self._stages[0]

    def _fill(self, found: Arrays, numbers: Ints) -> None:
        for name, values in found.items():
            shape = self._shapes[name]
            fits = values.shape[1:] == shape[1:] and len(values) <= shape[0]
            assert fits, f"{name} has shape {values.shape}, which does not fit {shape}"
            numbers[self._starts[name] : self._starts[name] + values.size] = values.reshape(-1)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __getitem__(self, name: str) -> Tensor:
        shape, start = self._shapes[name], self._starts[name]
        return self._device[start : start + int(np.prod(shape))].view(shape)

    def get(self, name: str) -> Tensor | None:
        return None if name not in self._shapes else self[name]

    def long(self, name: str) -> Tensor:
        """As torch's own indexing reads it; made anew from the buffer, so once a step."""
        return self[name].long()
