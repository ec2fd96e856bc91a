"""LFM2: gated short convolutions and grouped-query attention with norms of q and k per head; dense, usually tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.short_conv import GatedShortConv
from hypic.engine.models._config import head_dim, layer_numbers, read, refuse_unless, rotary_from
from hypic.engine.models._decoder import PreNormBlock, TextDecoder, renamed
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement
from hypic.errors import CheckpointError

RENAMED = (
    (".conv.conv.", ".mixer.convolution."),
    (".conv.", ".mixer."),
    (".convolution.", ".conv."),
    (".self_attn.out_proj.", ".mixer.o_proj."),
    (".self_attn.", ".mixer."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    ("embedding_norm.", "norm."),
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
        refuse_unless(config, "sliding_window", None)
        size, eps = read(config, "hidden_size", int), read(config, "norm_eps", float)
        types, width = _types(config), _mlp_width(config)
        blocks = [
            PreNormBlock(_mixer(config, kind), number, SwiGLU(size, width), size, eps)
            for kind, number in zip(types, layer_numbers(types, ("conv", "full_attention")), strict=True)
        ]
        rotary = rotary_from(config, head_dim(config), default_factor=1.0)
        tied = bool(config.get("tie_word_embeddings", config.get("tie_embedding", True)))
        return cls.of_blocks(config, types, blocks, RMSNorm(size, eps), rotary, tied=tied)

    def map_weights(self, name: str) -> Placement | None:
        name = name.removeprefix("model.")
        if self.is_tied_head(name):
            return None
        return Placement(renamed(name, RENAMED))


def _types(config: Mapping[str, Any]) -> list[str]:
    count, given = read(config, "num_hidden_layers", int), list(config.get("layer_types") or ())
    if given and len(given) != count:
        raise CheckpointError(f"config.json names {len(given)} layer_types for {count} layers; fix the file.")
    attending = config.get("full_attn_idxs")
    attending = range(count) if attending is None else attending
    return given or ["full_attention" if i in attending else "conv" for i in range(count)]


def _mixer(config: Mapping[str, Any], kind: str) -> nn.Module:
    size = read(config, "hidden_size", int)
    if kind == "conv":
        return GatedShortConv(size, read(config, "conv_L_cache", int), bias=bool(config.get("conv_bias", False)))
    return attention(config, norm_eps=read(config, "norm_eps", float), norm_centred=False)


def _mlp_width(config: Mapping[str, Any]) -> int:
    """Two thirds of ``intermediate_size``, times a factor, up to a multiple; where that is not turned off."""
    width = read(config, "intermediate_size", int)
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width, factor = int(2 * width / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = int(config.get("block_multiple_of", 256))
    return -(-int(factor * width) // multiple) * multiple
