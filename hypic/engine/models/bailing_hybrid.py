"""Ling 3: Kimi delta attention with a bounded gate; rotary latent attention with a gate per head at every group's end.

The last layer of every ``layer_group_size`` attends. The first layers are dense, the others have experts. Layers behind
the last, which predict several tokens at once, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hypic.engine.layers.decoder import Decoder
from hypic.engine.layers.kimi_delta_attention import KimiDeltaAttention, KimiDeltaShape
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary
from hypic.engine.models import _kimi
from hypic.engine.models._config import context_from, layer_numbers, read, refuse_unless, rope_from, types_from
from hypic.engine.models._experts import place_expert
from hypic.engine.weights import Placement, Placements
from hypic.errors import CheckpointError, UnsupportedModel

RENAMED = (
    ("word_embeddings.", "embed_tokens."),
    (".attention.", ".mixer."),
    (".self_attn.", ".mixer."),
    (".mixer.dense.", ".mixer.o_proj."),
    (".shared_experts.", ".shared_expert."),
    (".e_score_correction_bias", ".expert_bias"),
)


class Model(Decoder):
    """See the module's docstring."""

    layer_types: Sequence[str]
    max_context: int
    delta: KimiDeltaShape

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        config = _kimi.renamed(config)
        for name, value in REFUSED.items():
            refuse_unless(config, name, value)
        size, eps, delta = read(config, "hidden_size", int), read(config, "rms_norm_eps", float), _delta(config)
        types = types_from(config, read(config, "layer_group_size", int))
        numbers, is_dense = layer_numbers(types, ("linear_attention", "full_attention")), _kimi.dense_layers(config, 2)
        blocks = [
            _kimi.Block(_mixer(config, kind, delta), number, _kimi.mlp(config, dense), size, eps)
            for kind, number, dense in zip(types, numbers, is_dense, strict=True)
        ]
        tied = bool(config.get("tie_word_embeddings", False))
        model = cls(read(config, "vocab_size", int), size, blocks, RMSNorm(size, eps), _rotary(config), tied=tied)
        model.layer_types, model.max_context, model.delta = types, context_from(config), delta
        return model

    def map_weights(self, name: str) -> Placements:
        name = name.removeprefix("model.")
        if name.startswith("mtp.") or _kimi.is_extra_layer(name, len(self.layer_types)):
            return None
        if name == "lm_head.weight" and self.lm_head.weight is self.embed_tokens.weight:
            return None
        for theirs, ours in RENAMED:
            name = name.replace(theirs, ours)
        words = name.split(".")
        if words[2:3] == ["mixer"] and self.layer_types[int(words[1])] == "linear_attention":
            return _kimi.place_mixer(".".join(words[:3]), words[3], ".".join(words[4:]), self.delta)
        return place_expert(name, self) or Placement(name)


REFUSED = {"hidden_act": "silu", "score_function": "sigmoid", "use_bias": False, "sliding_window": None}


def _rotary(config: Mapping[str, Any]) -> Rotary:
    """Positions of the shared key, over all of it."""
    rope = rope_from(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported with latent attention; only plain positions are.")
    if rope.get("rope_theta") is None:
        raise CheckpointError("config.json gives no rope_theta; fix the file.")
    return Rotary(read(config, "qk_rope_head_dim", int), float(rope["rope_theta"]))


def _delta(config: Mapping[str, Any]) -> KimiDeltaShape:
    """Heads are as many as attention's. transformers' files name their size apart, released files ``head_dim``."""
    is_bounded = bool(config.get("kda_safe_gate", True))
    return KimiDeltaShape(
        hidden_size=read(config, "hidden_size", int),
        num_heads=int(config.get("linear_num_heads") or read(config, "num_attention_heads", int)),
        head_dim=int(config.get("linear_head_dim") or read(config, "head_dim", int)),
        conv_width=int(config.get("short_conv_kernel_size") or 4),
        eps=read(config, "rms_norm_eps", float),
        lower_bound=float(config.get("kda_lower_bound", -5.0)) if is_bounded else None,
    )


def _mixer(config: Mapping[str, Any], kind: str, delta: KimiDeltaShape) -> nn.Module:
    return KimiDeltaAttention(delta) if kind == "linear_attention" else _kimi.latent_attention(config, gated=True)
