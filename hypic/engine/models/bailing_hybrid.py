"""Ling 3: Kimi delta attention with a bounded gate; rotary latent attention with a gate per head at every group's end.

The last layer of every ``layer_group_size`` attends. The first layers are dense, the others have experts. Layers behind
the last, which predict several tokens at once, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from hypic.engine.layers.kimi_delta_attention import KimiDeltaAttention, KimiDeltaShape
from hypic.engine.models import _kimi
from hypic.engine.models._config import read, refuse_all_but, types_from
from hypic.engine.models._decoder import renamed
from hypic.engine.models._experts import place_expert
from hypic.engine.models._mixers import latent_attention, latent_rotary
from hypic.engine.weights import Placement, Placements

RENAMED = (
    ("word_embeddings.", "embed_tokens."),
    (".attention.", ".mixer."),
    (".self_attn.", ".mixer."),
    (".mixer.dense.", ".mixer.o_proj."),
    (".shared_experts.", ".shared_expert."),
    (".e_score_correction_bias", ".expert_bias"),
)


class Model(_kimi.KimiDecoder):
    """See the module's docstring."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        config = _kimi.with_known_names(config)
        refuse_all_but(config, REFUSED)
        types, delta = types_from(config, read(config, "layer_group_size", int)), _delta(config)
        make = partial(_mixer, config, delta=delta)
        return cls.of_layers(config, types, make, delta, num_dense=2, rotary=latent_rotary(config))

    def map_weights(self, name: str) -> Placements:
        name = name.removeprefix("model.")
        if name.startswith("mtp.") or _kimi.is_extra_layer(name, len(self.layer_types)):
            return None
        if self.is_tied_head(name):
            return None
        name = renamed(name, RENAMED)
        words = name.split(".")
        if words[2:3] == ["mixer"] and self.layer_types[int(words[1])] == "linear_attention":
            return _kimi.place_mixer(".".join(words[:3]), words[3], ".".join(words[4:]), self.delta)
        return place_expert(name, self) or Placement(name)


REFUSED = {"hidden_act": "silu", "score_function": "sigmoid", "use_bias": False, "sliding_window": None}


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


def _mixer(config: Mapping[str, Any], kind: str, *, delta: KimiDeltaShape) -> nn.Module:
    return KimiDeltaAttention(delta) if kind == "linear_attention" else latent_attention(config, gated=True)
