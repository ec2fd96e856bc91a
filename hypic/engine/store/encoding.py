"""An entry's image as one buffer and back: a safetensors file whose metadata says what it is. Never pickle.

The buffer is ``length of header (8 bytes) | header (JSON) | tensors``. The header begins with its metadata, and these
with an XXH3-128 checksum over all of the buffer but its own 32 digits, so that a reader finds it at a fixed place and
any flipped bit shows. Token ids travel as a tensor. Everything is checked before anything is used: what is not exactly
as ``encode`` writes it is ``StoreCorrupt``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from hypic.engine.segment import FORMAT_VERSION, Identity
from hypic.engine.store.image import AttentionPart, EntryImage, LinearPart
from hypic.errors import StoreCorrupt

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEAD = b'{"__metadata__":{"checksum":"'
CHECKSUM = slice(8 + len(_HEAD), 8 + len(_HEAD) + 32)
_ALIGNMENT = 64
MAX_HEADER_BYTES = 2**22
_LABELS = ("namespace", "name", "source")


@dataclass(frozen=True)
class Header:
    """What a file says of itself: metadata, and per tensor its type, shape and place in the data."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]
    num_bytes: int

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.metadata["key"])

    @property
    def identity(self) -> Identity:
        return Identity(*(self.metadata[name] for name in ("fingerprint", "dtype", "storage", "adapter")))

    @property
    def labels(self) -> dict[str, str | None]:
        """``namespace``, ``name`` and ``source``; one that is not there is ``None``."""
        return {label: self.metadata.get(label) for label in _LABELS}


def encode(image: EntryImage, pin: bool = False) -> Tensor:
    """One buffer of bytes on the host, ``[n]`` of uint8, in pinned memory if ``pin``."""
    tensors = dict(sorted(_all_tensors(image).items(), key=lambda item: -item[1].element_size()))
    header = _header(image, tensors)
    buffer = torch.empty(len(header) + sum(map(_size, tensors.values())), dtype=torch.uint8, pin_memory=pin)
    buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    start = len(header)
    for tensor in tensors.values():
        stop = start + _size(tensor)
        buffer[start:stop] = tensor.contiguous().view(-1).view(torch.uint8)
        start = stop
    digits = torch.frombuffer(bytearray(checksum(buffer).encode()), dtype=torch.uint8)
    buffer[CHECKSUM] = digits
    return buffer


def decode(buffer: Tensor, verify: bool = True) -> EntryImage:
    """The image in a buffer, its tensors views of it; ``verify`` compares the checksum.

    Raises:
        StoreCorrupt: the buffer is not exactly what ``encode`` writes.
    """
    header = read_header(_bytes(buffer)[: 8 + MAX_HEADER_BYTES])
    if header.num_bytes != len(buffer):
        raise StoreCorrupt(f"an entry of {header.num_bytes} bytes has {len(buffer)}; it is cut short or too long.")
    if verify and header.metadata["checksum"] != checksum(buffer):
        raise StoreCorrupt(f"the entry {header.metadata['key'][:16]} fails its checksum; it is damaged.")
    data = len(buffer) - sum(_span(spec)[1] - _span(spec)[0] for spec in header.tensors.values())
    return _image(header, {name: _view(buffer, data, spec) for name, spec in header.tensors.items()})


def checksum(buffer: Tensor) -> str:
    """XXH3-128 of a buffer, its own digits left out."""
    data = _bytes(buffer)
    digest = xxhash.xxh3_128(data[: CHECKSUM.start])
    digest.update(data[CHECKSUM.stop :])
    return digest.hexdigest()


def read_header(data: bytes | memoryview) -> Header:
    """The header at the beginning of a file; ``data`` may end anywhere behind it.

    Raises:
        StoreCorrupt: it is not one that ``encode`` writes.
    """
    length = int.from_bytes(bytes(data[:8]), "little")
    if len(data) < 8 or not len(_HEAD) < length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise StoreCorrupt(f"an entry's header is {length} bytes long, which cannot be; it is cut short or no entry.")
    try:
        found = json.loads(bytes(data[8 : 8 + length]))
        metadata = found.pop("__metadata__")
        _check_metadata(metadata)
        num_bytes = 8 + length + _check_tensors(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreCorrupt(f"an entry's header cannot be read ({error!r:.120}); it is damaged or no entry.") from error
    return Header(metadata, found, num_bytes)


# -- steps of the above ----------------------------------------------------------------------------------------------


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def _all_tensors(image: EntryImage) -> dict[str, Tensor]:
    return {"ids": torch.tensor(image.ids, dtype=torch.int32), **image.tensors}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _header(image: EntryImage, tensors: Mapping[str, Tensor]) -> bytes:
    found: dict[str, Any] = {"__metadata__": _metadata(image)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + _size(tensor)
        found[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    assert text.startswith(_HEAD) and len(text) <= MAX_HEADER_BYTES, "the checksum stands first"
    return len(text).to_bytes(8, "little") + text


def _metadata(image: EntryImage) -> dict[str, str]:
    identity = image.identity
    labels = {label: getattr(image, label) for label in _LABELS}
    return {
        "checksum": "0" * (CHECKSUM.stop - CHECKSUM.start),
        "version": str(FORMAT_VERSION),
        "key": image.key.hex(),
        "fingerprint": identity.fingerprint,
        "dtype": identity.dtype,
        "storage": identity.storage,
        "adapter": identity.adapter,
        "seam": str(image.seam),
        "snapshot": str(int(image.is_snapshot)),
        "deterministic": str(int(image.deterministic)),
        "layers": f"{len(image.linear)},{len(image.attention)}",
        **{label: text for label, text in labels.items() if text is not None},
    }


_REQUIRED = ("checksum", "version", "key", "fingerprint", "dtype", "storage", "adapter", "seam", "snapshot")


def _check_metadata(metadata: Any) -> None:
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("metadata must be text")
    missing = [name for name in (*_REQUIRED, "deterministic", "layers") if name not in metadata]
    if missing:
        raise ValueError(f"metadata lacks {missing[0]}")
    if metadata["version"] != str(FORMAT_VERSION):
        raise ValueError(f"format version {metadata['version']:.20}, not {FORMAT_VERSION}")
    if len(bytes.fromhex(metadata["key"])) != 32 or len(metadata["checksum"]) != 32:
        raise ValueError("key or checksum has the wrong length")
    if metadata["snapshot"] not in "01" or metadata["deterministic"] not in "01":
        raise ValueError("a flag is neither 0 nor 1")


def _check_tensors(tensors: Mapping[str, Any]) -> int:
    """Tensors follow each other without a gap, each as long as its type and shape say; bytes in all."""
    end = 0
    for name, spec in tensors.items():
        start, stop = _span(spec)
        if start != end or stop - start != math.prod(_shape(spec)) * _DTYPES[spec["dtype"]].itemsize:
            raise ValueError(f"tensor {name[:40]} does not stand where it should")
        end = stop
    return end


def _span(spec: Mapping[str, Any]) -> tuple[int, int]:
    start, stop = spec["data_offsets"]
    return _whole(start), _whole(stop)


def _shape(spec: Mapping[str, Any]) -> list[int]:
    return [_whole(number) for number in spec["shape"]]


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= number < 2**48:
        raise ValueError(f"{number!r:.20} is no size")
    return number


def _view(buffer: Tensor, data: int, spec: Mapping[str, Any]) -> Tensor:
    (start, stop), dtype = _span(spec), _DTYPES[spec["dtype"]]
    if (data + start) % dtype.itemsize:
        raise StoreCorrupt("an entry's tensors do not stand where their type can be read; it is no entry of ours.")
    return buffer[data + start : data + stop].view(dtype).view(_shape(spec))


def _image(header: Header, tensors: dict[str, Tensor]) -> EntryImage:
    metadata = header.metadata
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
        key=header.key,
        ids=tuple(ids.tolist()),
        seam=seam,
        identity=header.identity,
        linear=linear,
        attention=attention,
        is_snapshot=metadata["snapshot"] == "1",
        deterministic=metadata["deterministic"] == "1",
        **header.labels,
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


def as_buffer(data: bytes | bytearray | memoryview | Sequence[int]) -> Tensor:
    """Bytes as ``decode`` takes them; copied only where they cannot be written to."""
    view = memoryview(data)  # type: ignore[arg-type]
    array = np.frombuffer(view, dtype=np.uint8)
    return torch.from_numpy(array.copy() if view.readonly else array)
