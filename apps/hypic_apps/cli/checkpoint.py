"""The few facts about a checkpoint folder that other commands say in passing; ``hypic models FOLDER`` says all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Description:
    """A checkpoint as its files describe it; ``layers`` counts layers by type."""

    model_type: str
    layers: Mapping[str, int]
    num_parameters: int
    weight_bytes: int
    max_context: int | None


def describe(folder: Path) -> Description:
    """Reads ``config.json`` and the headers of the safetensors files.

    Raises:
        CheckpointError: the folder is none, or one of the files is missing or unreadable.
    """
    from hypic.checkpoints import describe as described

    info = described(folder)
    return Description(info.model_type, info.layers, info.num_parameters, info.weight_bytes, info.max_context)
