"""An entry's image as one buffer and back: a safetensors file whose metadata says what it is. Never pickle.

The buffer is ``length of header (8 bytes) | header (JSON) | tensors``. The header begins with its metadata, and these
with an XXH3-128 checksum over all of the buffer but its own 32 digits, so that a reader finds it at a fixed place and
any flipped bit shows. Token ids travel as a tensor. Everything is checked before anything is used: what is not exactly
as ``encode`` writes it is ``StoreCorrupt``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from hypic.engine.store.header import (
    CHECKSUM,
    DTYPES,
    LABELS,
    MAX_HEADER_BYTES,
    About,
    Header,
    read_about,
    read_header,
    shape_of,
    size_of,
    span_of,
    write_header,
)
from hypic.engine.store.image import AttentionPart, EntryImage, LinearPart
from hypic.errors import StoreCorrupt


def encode(image: EntryImage, pin: bool = False, has_checksum: bool = True) -> Tensor:
    """One buffer of bytes on the host, ``[n]`` of uint8, in pinned memory if ``pin``; the image may lie on a device.

    Without its checksum (``seal`` writes it) a buffer is good in memory, and no file.
    """
    tensors = dict(sorted(_all_tensors(image).items(), key=lambda item: -item[1].element_size()))
    header = write_header(image, tensors)
    buffer = torch.empty(len(header) + sum(map(size_of, tensors.values())), dtype=torch.uint8, pin_memory=pin)
    buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    start = len(header)
    for tensor in tensors.values():
        stop = start + size_of(tensor)
        buffer[start:stop].copy_(tensor.contiguous().view(-1).view(torch.uint8), non_blocking=True)
        start = stop
    _await_copies(tensors.values())
    return seal(buffer) if has_checksum else buffer


def seal(buffer: Tensor) -> Tensor:
    """Write an encoded entry's checksum into its place."""
    buffer[CHECKSUM] = torch.frombuffer(bytearray(checksum(buffer).encode()), dtype=torch.uint8)
    return buffer


def decode(buffer: Tensor, verify: bool = True) -> EntryImage:
    """The image in a buffer, its tensors views of it; ``verify`` compares the checksum.

    Raises:
        StoreCorrupt: the buffer is not exactly what ``encode`` writes.
    """
    header = read_header(_bytes(buffer)[: 8 + MAX_HEADER_BYTES])
    if header.num_bytes != len(buffer):
        raise StoreCorrupt(f"an entry of {header.num_bytes} bytes has {len(buffer)}; it is cut short or too long.")
    if verify and header.about.metadata["checksum"] != checksum(buffer):
        raise StoreCorrupt(f"the entry {header.about.metadata['key'][:16]} fails its checksum; it is damaged.")
    data = len(buffer) - sum(span_of(spec)[1] - span_of(spec)[0] for spec in header.tensors.values())
    return _image(header, {name: _view(buffer, data, spec) for name, spec in header.tensors.items()})


def decode_about(buffer: Tensor) -> About:
    """What a whole buffer says of itself.

    Raises:
        StoreCorrupt: as ``read_about`` does, and if the buffer is cut short.
    """
    length = int.from_bytes(bytes(_bytes(buffer)[:8]), "little")
    about = read_about(bytes(_bytes(buffer)[: 8 + min(length, MAX_HEADER_BYTES)]))
    if about is None:
        raise StoreCorrupt("an entry ends in the middle of its header; it is cut short.")
    return about


def checksum(buffer: Tensor) -> str:
    """XXH3-128 of a buffer, its own digits left out."""
    data = _bytes(buffer)
    digest = xxhash.xxh3_128(data[: CHECKSUM.start])
    digest.update(data[CHECKSUM.stop :])
    return digest.hexdigest()


# -- steps of the above ----------------------------------------------------------------------------------------------


def _await_copies(tensors: Iterable[Tensor]) -> None:
    """Copies to the host run on the streams of the devices that they come from, whichever device is the current one."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def _all_tensors(image: EntryImage) -> dict[str, Tensor]:
    return {"ids": torch.tensor(image.ids, dtype=torch.int32), **image.tensors}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(buffer: Tensor, data: int, spec: Mapping[str, Any]) -> Tensor:
    (start, stop), dtype = span_of(spec), DTYPES[spec["dtype"]]
    if (data + start) % dtype.itemsize:
        raise StoreCorrupt("an entry's tensors do not stand where their type can be read; it is no entry of ours.")
    return buffer[data + start : data + stop].view(dtype).view(shape_of(spec))


def _image(header: Header, tensors: dict[str, Tensor]) -> EntryImage:
    about, metadata = header.about, header.about.metadata
    try:
        num_linear, num_attention = (int(count) for count in metadata["layers"].split(","))
        ids, seam = tensors.pop("ids"), int(metadata["seam"])
        linear = tuple(_linear(tensors, f"linear.{n}") for n in range(min(num_linear, len(tensors))))
        attention = tuple(_attention(tensors, f"attention.{n}") for n in range(min(num_attention, len(tensors))))
    except (KeyError, ValueError) as error:
        raise StoreCorrupt(f"the entry {metadata['key'][:16]} lacks a part ({error}); it is damaged.") from error
    if tensors or ids.dtype != torch.int32 or ids.ndim != 1 or not 0 <= seam <= len(ids):
        raise StoreCorrupt(f"the entry {metadata['key'][:16]} has parts that do not belong there; it is damaged.")
    return EntryImage(
        key=about.key,
        ids=tuple(ids.tolist()),
        seam=seam,
        identity=about.identity,
        linear=linear,
        attention=attention,
        is_snapshot=about.is_snapshot,
        deterministic=metadata["deterministic"] == "1",
        labels=about.labels,
        expires_s=about.expires_s,
        primer=metadata.get("primer", ""),  # which the first versions did not know
        **{label: metadata.get(label) for label in LABELS},
    )


def _linear(tensors: dict[str, Tensor], prefix: str) -> LinearPart:
    return LinearPart(
        tensors.pop(f"{prefix}.transition", None),
        tensors.pop(f"{prefix}.end_state"),
        tensors.pop(f"{prefix}.tail"),
        tensors.pop(f"{prefix}.heads", None),
    )


def _attention(tensors: dict[str, Tensor], prefix: str) -> AttentionPart:
    return AttentionPart(tensors.pop(f"{prefix}.keys"), tensors.pop(f"{prefix}.values"))
