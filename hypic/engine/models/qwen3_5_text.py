"""Qwen3.5, dense, text part: three Gated DeltaNet layers to one gated full-attention layer.

Also loads the multimodal checkpoints' text weights (``model.language_model.*``); vision and multi-token-prediction
weights are left out. With text alone all components of the multimodal rotary positions are equal, which is plain
partial rotary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypic.engine.models._config import read
from hypic.engine.models._qwen import QwenDecoder, assemble, dense_mlp
from hypic.engine.weights import Placement

LEFT_OUT = ("mtp.", "model.visual.", "visual.", "model.mtp.")


class Model(QwenDecoder):
    """See the module's docstring."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        return assemble(cls, config, [dense_mlp(config) for _ in range(read(config, "num_hidden_layers", int))])

    def map_weights(self, name: str) -> Placement | None:
        return None if name.startswith(LEFT_OUT) else self.place(name)
