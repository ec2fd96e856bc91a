"""Qwen3.5 with experts, text part: as the dense model, with routed experts beside a shared one in every layer.

The router's weights always sum to one. Experts may lie in the checkpoint fused (``experts.gate_up_proj``) or one by
one. Vision and multi-token-prediction weights are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypic.engine.models._config import read
from hypic.engine.models._qwen import QwenDecoder, assemble, sparse_mlp
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
        count = read(config, "num_hidden_layers", int)
        return assemble(cls, config, [sparse_mlp(config, renormalise=True) for _ in range(count)])

    def map_weights(self, name: str) -> Placement | None:
        return None if name.startswith(LEFT_OUT) else self.place(name)
