"""What a checkpoint folder says about itself: its configuration and the headers of its weights, nothing loaded.

The safetensors format: 8 bytes with the header's length, then the header as JSON: name to dtype, shape and place.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic_apps.cli.errors import InputError

LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Description:
    """A checkpoint as its files describe it; ``layers`` counts layers by type."""

    model_type: str
    layers: Mapping[str, int]
    num_parameters: int
    weight_bytes: int
    max_context: int | None


def describe(folder: Path) -> Description:
    """Reads ``config.json`` and the headers of all ``.safetensors`` files.

    Raises:
        InputError: the folder is none, or one of the files is missing or unreadable.
    """
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is no folder; pass the folder of a Hugging Face checkpoint.")
    config = _config(folder / "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    headers = [_header(path) for path in sorted(folder.glob("*.safetensors"))]
    if not headers:
        raise InputError(f"{str(folder)!r} holds no .safetensors file; finish the download or convert the checkpoint.")
    tensors = [entry for header in headers for name, entry in header.items() if name != "__metadata__"]
    return Description(
        model_type=str(text.get("model_type", "unknown")),
        layers=_layers(text),
        num_parameters=sum(math.prod(entry["shape"]) for entry in tensors),
        weight_bytes=sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors),
        max_context=text.get("max_position_embeddings"),
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}; pass a checkpoint's folder.") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is no JSON ({error}); download the checkpoint again.") from error
    if not isinstance(config, dict):
        raise InputError(f"{str(path)!r} is no JSON object; download the checkpoint again.")
    return config


def _layers(config: Mapping[str, Any]) -> Mapping[str, int]:
    types = config.get("layer_types")
    if isinstance(types, list):
        return dict(Counter(str(kind) for kind in types))
    count = config.get("num_hidden_layers")
    return {"layers": count} if isinstance(count, int) else {}


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < LONGEST_HEADER_BYTES else None
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}); download it again.") from error
    if not isinstance(header, dict):
        raise InputError(f"{str(path)!r} is no safetensors file; download it again.")
    return header
