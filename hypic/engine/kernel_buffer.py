"""Arrays of a step, padded to the lengths of a recorded one and sent to the device in one copy.

Padding does no harm: rows of no token, chains of no element, writes to the pool's spare slots. So a recorded graph can
be run again with other contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hypic.engine.kernel_arrays import Arrays, Ints
from hypic_kernels.conv import NOTHING

CHAIN_ARRAYS = (
    *("finals", "initial_slots", "final_slots", "starts", "lengths", "final_positions"),
    *("final_tile_chain", "final_tile_first", "final_tile_count"),
)
NOWHERE = -1
ALIGNED = 4  # numbers: Triton compiles anew for a pointer that is not a multiple of 16 bytes


@dataclass(frozen=True)
class Spare:
    """Where padding writes: a token slot and a state slot that nobody reads."""

    token: int
    state: int


@dataclass(frozen=True)
class Bucket:
    """Lengths that a recorded step's arrays are padded to."""

    tokens: int
    chunks: int
    chunk_size: int
    elements: int
    chains: int
    writes: int
    interiors: int
    outputs: int
    tiles: int

    def holds(self, found: Arrays, num_outputs: int) -> bool:
        """Whether a step fits: no array is longer than its capacity."""
        fits = all(len(values) <= self.lengths[name] for name, values in found.items())
        return fits and num_outputs <= self.outputs and found["chunks"].shape[1] == self.chunk_size

    @property
    def lengths(self) -> Mapping[str, int]:
        tokens = dict.fromkeys(("ids", "positions", "kv_slots", "token_chunks", "conv_sources"), self.tokens)
        writes = dict.fromkeys(("write_slots", "write_places", "conv_write_slots", "conv_write_sources"), self.writes)
        chains = dict.fromkeys(CHAIN_ARRAYS, self.chains)
        interiors = ("interior_states", "interior_transitions", "interior_origins")
        return {
            **tokens,
            **writes,
            **chains,
            **dict.fromkeys(interiors, self.interiors),
            **dict.fromkeys(("tile_chain", "tile_first", "tile_count"), self.tiles),
            "chunks": self.chunks,
            **dict.fromkeys(("elements", "element_turns"), self.elements),
            "cu_elements": self.chains + 1,
        }


def padded(found: Arrays, bucket: Bucket, spare: Spare) -> dict[str, Ints]:
    """A step's arrays at a bucket's lengths."""
    fills = {
        "kv_slots": spare.token,
        "conv_sources": NOTHING,
        "conv_write_sources": NOTHING,
        "conv_write_slots": NOWHERE,
        "write_slots": spare.state,
        "final_slots": NOWHERE,
        "chunks": bucket.tokens,
        "cu_elements": found["cu_elements"][-1],
    }
    lengths = bucket.lengths
    made = {name: _extended(values, lengths[name], fills.get(name, 0)) for name, values in found.items()}
    num_tokens = len(found["ids"])
    made["chunks"] = np.where(made["chunks"] == num_tokens, bucket.tokens, made["chunks"]).astype(np.int32)
    return made


def _extended(values: Ints, length: int, fill: int) -> Ints:
    out = np.full((length, *values.shape[1:]), fill, dtype=np.int32)
    out[: len(values)] = values
    return out


def resolved(places: Ints, num_outputs: int) -> Ints:
    """Places of states in ``[before | final]``, given those of finals as ``-1 - chain``."""
    return np.where(places < 0, num_outputs - 1 - places, places).astype(np.int32)


class Sent:
    """Arrays on a device, by name: views of one buffer, which later arrays of the same lengths may overwrite."""

    def __init__(self, found: Arrays, device: torch.device) -> None:
        starts, total = {}, 0
        for name, values in found.items():
            starts[name] = total
            total += -(-values.size // ALIGNED) * ALIGNED
        self._starts, self._host = starts, torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.empty(total, dtype=torch.int32, device=device)
        self._shapes = {name: values.shape for name, values in found.items()}
        self.write(found)

    def write(self, found: Arrays) -> None:
        """Send contents; the caller has waited for the step that used the former ones."""
        host = self._host.numpy()
        for name, values in found.items():
            assert values.shape == self._shapes[name], f"{name} has shape {values.shape}, not {self._shapes[name]}"
            host[self._starts[name] : self._starts[name] + values.size] = values.reshape(-1)
        self._device.copy_(self._host, non_blocking=True)

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
