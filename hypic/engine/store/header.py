"""The header of an encoded entry: what it says of itself, and where its tensors stand. Read strictly, never trusted.

A header is JSON that begins with metadata, and these with the checksum of the whole entry, at a fixed place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic.engine.segment import FORMAT_VERSION, Identity, Label
from hypic.engine.store.image import EntryImage
from hypic.errors import StoreCorrupt

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEAD = b'{"__metadata__":{"checksum":"'
CHECKSUM = slice(8 + len(_HEAD), 8 + len(_HEAD) + 32)
_ALIGNMENT = 64
MAX_HEADER_BYTES = 2**22
LABELS = ("namespace", "name", "source")


@dataclass(frozen=True)
class About:
    """What an entry says of itself, without its tensors."""

    metadata: Mapping[str, str]

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.metadata["key"])

    @property
    def num_tokens(self) -> int:
        return int(self.metadata["tokens"])

    @property
    def num_kept_heads(self) -> tuple[int, int]:
        """Transitions that are kept, of how many."""
        kept, whole = self.metadata["kept"].split(",")
        return int(kept), int(whole)

    @property
    def is_snapshot(self) -> bool:
        return self.metadata["snapshot"] == "1"

    @property
    def identity(self) -> Identity:
        told = self.metadata
        return Identity(told["fingerprint"], told["dtype"], told["storage"], told["adapter"])

    @property
    def labels(self) -> frozenset[Label]:
        """All under which the text was passed."""
        return frozenset(Label(*label) for label in json.loads(self.metadata["labels"]))

    @property
    def expires_s(self) -> float | None:
        text = self.metadata["expires_s"]
        return float(text) if text else None


@dataclass(frozen=True)
class Header:
    """A whole header: per tensor also its type, shape and place in the data; ``num_bytes`` of the file."""

    about: About
    tensors: Mapping[str, Mapping[str, Any]]
    num_bytes: int


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_header(image: EntryImage, tensors: Mapping[str, Tensor]) -> bytes:
    found: dict[str, Any] = {"__metadata__": _metadata(image)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + size_of(tensor)
        found[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    assert text.startswith(_HEAD) and len(text) <= MAX_HEADER_BYTES, "the checksum stands first"
    return len(text).to_bytes(8, "little") + text


def _metadata(image: EntryImage) -> dict[str, str]:
    identity = image.identity
    named = {label: getattr(image, label) for label in LABELS}
    labels = sorted(([label.name, label.source, label.namespace] for label in image.labels), key=repr)
    return {
        "checksum": "0" * (CHECKSUM.stop - CHECKSUM.start),
        "version": str(FORMAT_VERSION),
        "key": image.key.hex(),
        "fingerprint": identity.fingerprint,
        "dtype": identity.dtype,
        "storage": identity.storage,
        "adapter": identity.adapter,
        "seam": str(image.seam),
        "primer": image.primer,
        "snapshot": str(int(image.is_snapshot)),
        "deterministic": str(int(image.deterministic)),
        "tokens": str(len(image.ids)),
        "kept": ",".join(map(str, image.num_kept_heads)),
        "layers": f"{len(image.linear)},{len(image.attention)}",
        "expires_s": "" if image.expires_s is None else repr(image.expires_s),
        "labels": json.dumps(labels),
        **{label: text for label, text in named.items() if text is not None},
    }


_REQUIRED = (
    *("checksum", "version", "key", "fingerprint", "dtype", "storage", "adapter", "seam", "snapshot"),
    *("deterministic", "tokens", "kept", "layers", "expires_s", "labels"),
)


def _check_metadata(metadata: Any) -> None:
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("metadata must be text")
    missing = [name for name in _REQUIRED if name not in metadata]
    if missing:
        raise ValueError(f"metadata lacks {missing[0]}")
    if metadata["version"] != str(FORMAT_VERSION):
        raise ValueError(f"format version {metadata['version']:.20}, not {FORMAT_VERSION}")
    int(metadata["tokens"])
    kept, whole = (int(count) for count in metadata["kept"].split(","))
    if not 0 <= kept <= whole:
        raise ValueError("more transitions are kept than there are")
    if len(bytes.fromhex(metadata["key"])) != 32 or len(metadata["checksum"]) != 32:
        raise ValueError("key or checksum has the wrong length")
    if metadata["snapshot"] not in "01" or metadata["deterministic"] not in "01":
        raise ValueError("a flag is neither 0 nor 1")
    labels, expires_s = json.loads(metadata["labels"]), metadata["expires_s"]
    if not all(len(label) == 3 and all(isinstance(text, str | None) for text in label) for label in labels):
        raise ValueError("a label is not name, source and namespace")
    if expires_s and not math.isfinite(float(expires_s)):
        raise ValueError("it expires at no time")


def _check_tensors(tensors: Mapping[str, Any]) -> int:
    """Tensors follow each other without a gap, each as long as its type and shape say; bytes in all."""
    end = 0
    for name, spec in tensors.items():
        start, stop = span_of(spec)
        if start != end or stop - start != math.prod(shape_of(spec)) * DTYPES[spec["dtype"]].itemsize:
            raise ValueError(f"tensor {name[:40]} does not stand where it should")
        end = stop
    return end


def span_of(spec: Mapping[str, Any]) -> tuple[int, int]:
    start, stop = spec["data_offsets"]
    return _whole(start), _whole(stop)


def shape_of(spec: Mapping[str, Any]) -> list[int]:
    return [_whole(number) for number in spec["shape"]]


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= number < 2**48:
        raise ValueError(f"{number!r:.20} is no size")
    return number


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
    return Header(About(metadata), found, num_bytes)


def read_about(data: bytes) -> About | None:
    """The metadata at the beginning of a file, or ``None`` if ``data`` ends before they do.

    Raises:
        StoreCorrupt: they are not such as ``encode`` writes.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        if not data[8:].startswith(_HEAD) or not len(_HEAD) < length <= MAX_HEADER_BYTES:
            raise ValueError("it does not begin as an entry does")
        text = data[8 : 8 + length].decode("utf-8", "replace")
        metadata, _ = json.JSONDecoder().raw_decode(text, text.index(":") + 1)
        _check_metadata(metadata)
    except json.JSONDecodeError as error:
        if len(data) < 8 + length:
            return None
        raise StoreCorrupt(f"an entry's metadata cannot be read ({error}); it is damaged.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreCorrupt(f"an entry's metadata cannot be read ({error!r:.120}); it is damaged.") from error
    return About(metadata)
