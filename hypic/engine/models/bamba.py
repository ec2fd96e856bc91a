"""Bamba: Mamba-2 layers with a few grouped-query attention layers between them, whose positions turn half a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypic.engine.layers.decoder import Decoder
from hypic.engine.layers.mamba2 import Mamba2Mixer
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.models._config import context_from, layer_numbers, read, refuse_unless, rotary_from
from hypic.engine.models._mamba import PreNormBlock, attention, head_dim, mamba2_shape
from hypic.engine.weights import Placement

RENAMED = (
    (".mamba.", ".mixer."),
    (".self_attn.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("final_layernorm.", "norm."),
)


class Model(Decoder):
    """See the module's docstring."""

    layer_types: Sequence[str]
    max_context: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_unless(config, "hidden_act", "silu")
        refuse_unless(config, "mlp_bias", False)
        refuse_unless(config, "num_experts", 1)
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
        rotary, tied = rotary_from(config, head_dim(config), default_factor=0.5), config.get("tie_word_embeddings")
        model = cls(read(config, "vocab_size", int), size, blocks, RMSNorm(size, eps), rotary, tied=bool(tied))
        model.layer_types, model.max_context = types, context_from(config)
        return model

    def map_weights(self, name: str) -> Placement | None:
        name = name.removeprefix("model.")
        if name == "lm_head.weight" and self.lm_head.weight is self.embed_tokens.weight:
            return None
        for theirs, ours in RENAMED:
            name = name.replace(theirs, ours)
        return Placement(name)


def _types(config: Mapping[str, Any]) -> list[str]:
    attending = set(config.get("attn_layer_indices") or ())
    count = read(config, "num_hidden_layers", int)
    return ["full_attention" if i in attending else "linear_attention" for i in range(count)]
