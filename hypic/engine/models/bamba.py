"""Bamba: Mamba-2 layers with a few grouped-query attention layers between them, whose positions turn half a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypic.engine.layers.mamba2 import Mamba2Mixer
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.models._config import head_dim, layer_numbers, read, refuse_all_but, rotary_from
from hypic.engine.models._decoder import PreNormBlock, TextDecoder, renamed
from hypic.engine.models._mamba import mamba2_shape
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement

RENAMED = (
    (".mamba.", ".mixer."),
    (".self_attn.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("final_layernorm.", "norm."),
)


class Model(TextDecoder):
    """See the module's docstring."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        types, width = _types(config), read(config, "intermediate_size", int)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        blocks = [
            PreNormBlock(
                Mamba2Mixer(mamba2_shape(config)) if kind == "linear_attention" else attention(config),
                number,
                SwiGLU(size, width),
                size,
                eps,
            )
            for kind, number in zip(types, numbers, strict=True)
        ]
        rotary = rotary_from(config, head_dim(config), default_factor=0.5)
        return cls.of_blocks(config, types, blocks, RMSNorm(size, eps), rotary)

    def map_weights(self, name: str) -> Placement | None:
        name = name.removeprefix("model.")
        if self.is_tied_head(name):
            return None
        return Placement(renamed(name, RENAMED))


REFUSED = {"hidden_act": "silu", "mlp_bias": False, "num_experts": 1}


def _types(config: Mapping[str, Any]) -> list[str]:
    attending = set(config.get("attn_layer_indices") or ())
    count = read(config, "num_hidden_layers", int)
    return ["full_attention" if i in attending else "linear_attention" for i in range(count)]
