"""Tensors by name as one run of bytes on their own device, and back, with a digest that is computed where they lie.

An entry of a large model is over a hundred megabytes and never leaves the device on its way to another GPU, so neither
do packing and checking. It has a hundred parts and more, and what is done for each of them is done while nobody else of
this process may run: so tensors of one type lie together and are copied, looked at and split by type, and the words of
their description are read once for all entries of one length. The digest is a sum of 64-bit words, each times an odd
weight of its place, modulo 2**64: any changed word changes it, and so do words that changed places. It guards against
damage, not against forgery: who may speak is settled when a connection is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Run:
    """Tensors of one type, one behind the other from ``start`` on: each is as many elements as its ``sizes``, of which
    the first ``numels`` are its own."""

    dtype: torch.dtype
    start: int
    stop: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    sizes: tuple[int, ...]

    def region(self, data: Tensor) -> Tensor:
        return data[self.start : self.stop].view(self.dtype)

    def tensors(self, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        pieces = torch.split(self.region(data), list(self.sizes))
        for name, shape, count, size, piece in zip(
            self.names, self.shapes, self.numels, self.sizes, pieces, strict=True
        ):
            yield name, (piece if size == count else piece[:count]).view(shape)


def pack(tensors: Mapping[str, Tensor]) -> tuple[tuple[Spec, ...], Tensor]:
    """All tensors, those of one type together: ``[n]`` of uint8 on their device, each at the next multiple of 64."""
    named = sorted(tensors.items(), key=lambda item: _NAMES[item[1].dtype])
    specs = tuple((name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in named)
    devices = {tensor.device for tensor in tensors.values()}
    assert len(devices) == 1, f"packed from several devices: {devices}"
    data = torch.zeros(packed_bytes(specs), dtype=torch.uint8, device=devices.pop())
    with torch.inference_mode():
        for run in _runs(specs):  # a few kernels for all of a type
            targets = dict(run.tensors(data))
            torch._foreach_copy_(list(targets.values()), [tensors[name] for name in targets])
    return specs, data


def packed_bytes(specs: tuple[Spec, ...]) -> int:
    """Bytes that ``pack`` makes of tensors like these.

    Raises:
        StoreCorrupt: a type is not known or a shape cannot be.
    """
    return max((run.stop for run in _runs(specs)), default=0)


def unpack(specs: tuple[Spec, ...], data: Tensor) -> dict[str, Tensor]:
    """The tensors, views of ``data``.

    Raises:
        StoreCorrupt: they do not fit the data.
    """
    if packed_bytes(specs) != len(data) or len({name for name, _, _ in specs}) != len(specs):
        raise StoreCorrupt(f"an entry of {len(data)} bytes came with parts that do not fill it; it is not used.")
    return {name: tensor for run in _runs(specs) for name, tensor in run.tensors(data)}


def is_finite(specs: tuple[Spec, ...], data: Tensor) -> bool:
    """Whether all numbers are, what lies between them included: the ends of each type's, and one answer for all."""
    regions = [run.region(data) for run in _runs(specs) if run.dtype.is_floating_point and run.stop > run.start]
    ends = [end.isfinite() for region in regions for end in torch.aminmax(region)]
    return not ends or bool(torch.stack(ends).all())


@lru_cache(256)
def written(specs: tuple[Spec, ...]) -> str:
    """As they are said to a peer."""
    return json.dumps(specs, separators=(",", ":"))


@lru_cache(256)
def read(text: str) -> tuple[Spec, ...]:
    """As a peer has said them.

    Raises:
        StoreCorrupt: they are none.
    """
    try:
        return tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in json.loads(text))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise StoreCorrupt("an entry came with parts that cannot be read; it is not used.") from error


def digest(data: Tensor) -> int:
    """Of ``data [n]``, uint8, on whatever device it is; a signed 64-bit number."""
    words = data[: len(data) // 8 * 8].view(torch.int64)
    weights = torch.arange(min(_DIGEST_WORDS, len(words)), dtype=torch.int64, device=data.device) * _MULTIPLIER | 1
    sums = [(block * weights[: len(block)]).sum() for block in torch.split(words, _DIGEST_WORDS)]
    rest = data[len(words) * 8 :].long()
    sums.append((rest * (torch.arange(len(rest), device=data.device) * 2 + 1)).sum())
    total = len(data)
    for number, found in enumerate(torch.stack(sums).tolist()):  # waits for the device once
        total = (total * 31 + found * (2 * number + 1)) % 2**64
    return total - 2**64 if total >= 2**63 else total


# 2**64 over the golden ratio, as a signed number: neighbouring places get weights that have nothing in common.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


@lru_cache(256)
def _runs(specs: tuple[Spec, ...]) -> tuple[_Run, ...]:
    """Where each lies.

    Raises:
        StoreCorrupt: a type is not known or a shape cannot be.
    """
    runs, start, first = list[_Run](), 0, 0
    for number, (_, dtype, _) in enumerate(specs, 1):
        if number == len(specs) or specs[number][1] != dtype:
            runs.append(_run(specs[first:number], start))
            first, start = number, runs[-1].stop
    return tuple(runs)


def _run(specs: Sequence[Spec], start: int) -> _Run:
    num_bytes = [_size(spec) for spec in specs]
    names, dtypes, shapes = zip(*specs, strict=True)
    dtype = _DTYPES[dtypes[0]]
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in num_bytes]
    numels = tuple(size // dtype.itemsize for size in num_bytes)
    sizes = tuple(size // dtype.itemsize for size in aligned)
    return _Run(dtype, start, start + sum(aligned), names, shapes, numels, sizes)


def _size(spec: Spec) -> int:
    _, dtype, shape = spec
    if dtype not in _DTYPES or any(not 0 <= n < 2**40 for n in shape) or math.prod(shape) > 2**44:
        raise StoreCorrupt(f"an entry's part is {dtype} {shape}, which cannot be; it is not used.")
    return math.prod(shape) * _DTYPES[dtype].itemsize
