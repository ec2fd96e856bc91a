"""One file per Hugging Face ``model_type``; the file's name is its registration.

Each file holds a class ``Model`` with ``from_config(config) -> Model`` (on whatever device is current),
``layer_types``, ``max_context``, ``map_weights(name)``, and, through ``Decoder``, ``layout``, ``forward(batch, pool)``
and ``logits``. What each model type is, and which ones are refused and why, stands in ``_families``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from hypic.engine.batch import Batch
from hypic.engine.layers.dense import Heads
from hypic.engine.layers.rotary import MOVES_NO_GATE
from hypic.engine.models._config import refuse_quantised
from hypic.engine.models._families import ALIASES, BY_ARCHITECTURE, REFUSED
from hypic.engine.pool import Layout, Pool
from hypic.engine.weights import Placements
from hypic.errors import UnsupportedModel
from hypic_kernels.attention import HeadDims


class Model(Protocol):
    """What the runner needs of a model."""

    layer_types: Sequence[str]
    max_context: int

    linear_rotary: object | None

    @property
    def layout(self) -> Layout: ...
    @property
    def is_paged(self) -> bool: ...
    @property
    def heads(self) -> Sequence[tuple[HeadDims, int]]: ...
    @property
    def dense_heads(self) -> Sequence[Heads]: ...
    @property
    def is_recordable(self) -> bool: ...
    def runs_rows(self) -> bool: ...
    def map_weights(self, name: str) -> Placements: ...
    def forward(self, batch: Batch, pool: Pool) -> Tensor: ...
    def forward_final(self, batch: Batch, pool: Pool) -> tuple[Tensor, Tensor]: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


def supported() -> list[str]:
    """Model types that have a file here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a multimodal wrapper's configuration, or the configuration itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def family_of(config: Mapping[str, Any]) -> str:
    """The file here that builds a ``config.json``: by its architecture where that tells more, else its ``model_type``.

    Raises:
        UnsupportedModel: there is none; with the reason where the type is known.
    """
    text = text_config(config)
    found = text.get("model_type")
    name = str(found or "").lower()
    architectures = list(text.get("architectures") or [""])
    name = BY_ARCHITECTURE.get(str(architectures[0]), ALIASES.get(name, name))
    if name in REFUSED:
        raise UnsupportedModel(f"model_type {found!r} is not supported: {REFUSED[name]}; load another model.")
    if name not in supported():
        raise UnsupportedModel(f"model_type {found!r} is not supported; supported are {', '.join(supported())}.")
    return name


def build(config: Mapping[str, Any]) -> nn.Module:
    """The model of a ``config.json``, with uninitialised parameters.

    Raises:
        UnsupportedModel: its ``model_type`` has no file here, its weights are quantised, or a feature is refused.
        CheckpointError: a field of the configuration is missing or wrong.
    """
    text = text_config(config)
    refuse_quantised(config)
    refuse_quantised(text)
    module = importlib.import_module(f"{__name__}.{family_of(config)}")
    model: nn.Module = module.Model.from_config(text)
    refuse_moving_gates(model)
    return model


def refuse_moving_gates(model: nn.Module) -> None:
    """Refuse rotary keys in linear layers with a gate per channel, whatever the kind of their transition.

    Raises:
        UnsupportedModel: the model has such layers.
    """
    families = [getattr(part, "family", None) for part in model.modules()]
    has_gate = any(getattr(family, "has_channel_gate", False) for family in families)
    if has_gate and getattr(model, "linear_rotary", None) is not None:
        raise UnsupportedModel(MOVES_NO_GATE)
