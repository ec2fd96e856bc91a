"""Checkpoints: the bundled demonstration model, and what a folder says about itself before any weight is loaded.

from hypic.checkpoints import describe

info = describe("path/to/checkpoint")
print(info.model_type, info.num_parameters, info.segment_bytes(512))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypic.checkpoints.description import (
        CheckpointInfo,
        Fit,
        ModelType,
        describe,
        model_types,
        refused,
        token_counts,
    )

__all__ = [
    "BUNDLED",
    "CheckpointInfo",
    "Fit",
    "ModelType",
    "bundled",
    "describe",
    "is_bundled",
    "model_types",
    "refused",
    "token_counts",
]
BUNDLED = "hypic-tiny"


def bundled() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(__file__).parent / BUNDLED


def is_bundled(model: object) -> bool:
    """Whether what names a model means the bundled checkpoint: ``None`` does, and so does the text ``hypic-tiny``,
    unless the working directory holds a checkpoint of that name. A ``Path`` is always a place of its own."""
    return model is None or (model == BUNDLED and not (Path(BUNDLED) / "config.json").is_file())


def __getattr__(name: str) -> Any:
    """What reads checkpoints brings torch with it, so it is imported when it is first asked for."""
    if name in __all__:
        from hypic.checkpoints import description

        return getattr(description, name)
    raise AttributeError(f"module 'hypic.checkpoints' has no attribute {name!r}")
