"""Tensors by name as one run of bytes on their own device, and back, with a digest that is computed where they lie.

An entry of a large model is over a hundred megabytes and never leaves the device on its way to another GPU, so neither
do packing and checking. The digest is a sum of 64-bit words, each times an odd weight of its place, modulo 2**64: any
changed word changes it, and so do words that changed places. It guards against damage, not against forgery: who may
speak is settled when a connection is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hypic.errors import StoreCorrupt

Spec = tuple[str, str, tuple[int, ...]]
ALIGNMENT = 64
_DIGEST_WORDS = 2**21
_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def pack(tensors: Mapping[str, Tensor]) -> tuple[tuple[Spec, ...], Tensor]:
    """All tensors, in their order: ``[n]`` of uint8 on their device, each at the next multiple of 64 bytes."""
    specs = tuple((name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items())
    devices = {tensor.device for tensor in tensors.values()}
    assert len(devices) == 1, f"packed from several devices: {devices}"
    data = torch.zeros(packed_bytes(specs), dtype=torch.uint8, device=devices.pop())
    with torch.inference_mode():
        torch._foreach_copy_(list(unpack(specs, data).values()), list(tensors.values()))  # a few kernels for all
    return specs, data


def packed_bytes(specs: Sequence[Spec]) -> int:
    """Bytes that ``pack`` makes of tensors like these.

    Raises:
        StoreCorrupt: a type is not known or a shape cannot be.
    """
    return sum(_aligned(_size(spec)) for spec in specs)


def unpack(specs: Sequence[Spec], data: Tensor) -> dict[str, Tensor]:
    """The tensors, views of ``data``.

    Raises:
        StoreCorrupt: they do not fit the data.
    """
    if packed_bytes(specs) != len(data) or len({name for name, _, _ in specs}) != len(specs):
        raise StoreCorrupt(f"an entry of {len(data)} bytes came with parts that do not fill it; it is not used.")
    tensors, start = {}, 0
    for spec in specs:
        size = _size(spec)
        tensors[spec[0]] = data[start : start + size].view(_DTYPES[spec[1]]).view(spec[2])
        start += _aligned(size)
    return tensors


def digest(data: Tensor) -> int:
    """Of ``data [n]``, uint8, on whatever device it is; a signed 64-bit number."""
    words = data[: len(data) // 8 * 8].view(torch.int64)
    total = torch.full((), len(data), dtype=torch.int64, device=data.device)
    weights = torch.arange(min(_DIGEST_WORDS, len(words)), dtype=torch.int64, device=data.device) * _MULTIPLIER | 1
    for number, block in enumerate(torch.split(words, _DIGEST_WORDS)):
        total = total * 31 + (block * weights[: len(block)]).sum() * (2 * number + 1)
    rest = data[len(words) * 8 :].long()
    total = total * 31 + (rest * (torch.arange(len(rest), device=data.device) * 2 + 1)).sum()
    return int(total)


# 2**64 over the golden ratio, as a signed number: neighbouring places get weights that have nothing in common.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


@lru_cache(4096)  # layers are alike
def _size(spec: Spec) -> int:
    _, dtype, shape = spec
    if dtype not in _DTYPES or any(not 0 <= n < 2**40 for n in shape) or math.prod(shape) > 2**44:
        raise StoreCorrupt(f"an entry's part is {dtype} {shape}, which cannot be; it is not used.")
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
