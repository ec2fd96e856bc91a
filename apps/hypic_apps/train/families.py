"""The shapes that can be trained, by the name of their linear layers' family and by their checkpoints' model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypic_apps.train.architecture import Architecture
from hypic_apps.train.model import MODEL_TYPE as GDN
from hypic_apps.train.model import Shape
from hypic_apps.train.ring import MODEL_TYPE as RING
from hypic_apps.train.ring import RingShape

FAMILIES: Mapping[str, type[Shape] | type[RingShape]] = {"gdn": Shape, "ring": RingShape}
BY_MODEL_TYPE: Mapping[str, type[Shape] | type[RingShape]] = {GDN: Shape, RING: RingShape}


def shape_of(config: Mapping[str, Any]) -> Architecture:
    """The shape that a ``config.json`` describes.

    Raises:
        ValueError: its model type is not one that is trained here.
    """
    kind = str(config.get("model_type"))
    if kind not in BY_MODEL_TYPE:
        raise ValueError(f"model_type {kind!r} is not trained here; known are {', '.join(BY_MODEL_TYPE)}.")
    return BY_MODEL_TYPE[kind].of_config(config)
