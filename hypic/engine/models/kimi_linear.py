"""Kimi-Linear: Kimi delta attention with latent attention without positions in between; experts behind a dense layer.

Which layers attend stands in ``linear_attn_config``, counted from one. transformers' files say it in ``layer_types``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hypic.engine.layers.kimi_delta_attention import KimiDeltaAttention, KimiDeltaShape
from hypic.engine.models import _kimi
from hypic.engine.models._config import read, refuse_all_but
from hypic.engine.models._experts import place_expert
from hypic.engine.models._mixers import latent_attention
from hypic.engine.weights import Placement, Placements
from hypic.errors import UnsupportedModel

EXPERT = re.compile(r"\.experts\.(\d+)\.(w1|w2|w3)\.")
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


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
        delta = _delta(config)
        make = partial(_mixer, config, delta=delta)
        return cls.of_layers(config, _types(config), make, delta, num_dense=1, rotary=None)

    def map_weights(self, name: str) -> Placements:
        name = name.removeprefix("model.")
        if _kimi.is_extra_layer(name, len(self.layer_types)):
            return None
        if self.is_tied_head(name):
            return None
        words = name.replace(".self_attn.", ".mixer.").split(".")
        if words[2:3] == ["mixer"] and self.layer_types[int(words[1])] == "linear_attention":
            return _kimi.place_mixer(".".join(words[:3]), words[3], ".".join(words[4:]), self.delta)
        name = ".".join(words).replace(".block_sparse_moe.", ".mlp.").replace(".shared_experts.", ".shared_expert.")
        name = name.replace(".e_score_correction_bias", ".expert_bias")
        name = EXPERT.sub(lambda found: f".experts.{found[1]}.{PARTS[found[2]]}.", name)
        return place_expert(name, self) or Placement(name)


REFUSED = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_scaling": None,
}


def _linear_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("linear_attn_config")
    return found if isinstance(found, Mapping) else {}


def _types(config: Mapping[str, Any]) -> list[str]:
    """From the lists of layers, or from ``layer_types``.

    Raises:
        UnsupportedModel: the file says of some layer neither or both.
    """
    if config.get("layer_types"):
        return list(config["layer_types"])
    lists, count = _linear_config(config), read(config, "num_hidden_layers", int)
    attending, linear = set(lists.get("full_attn_layers") or ()), set(lists.get("kda_layers") or ())
    if attending & linear or attending | linear != set(range(1, count + 1)):
        raise UnsupportedModel(
            f"linear_attn_config does not sort all {count} layers into full_attn_layers and kda_layers; fix the file."
        )
    return ["full_attention" if number in attending else "linear_attention" for number in range(1, count + 1)]


def _delta(config: Mapping[str, Any]) -> KimiDeltaShape:
    lists = _linear_config(config)
    merged = {
        "num_heads": lists.get("num_heads", config.get("linear_num_heads")),
        "head_dim": lists.get("head_dim", config.get("linear_head_dim")),
        "conv_width": lists.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
    }
    sizes = {name: read(merged, name, int) for name in merged}
    eps = read(config, "rms_norm_eps", float)
    return KimiDeltaShape(read(config, "hidden_size", int), eps=eps, gate_rank=sizes["head_dim"], **sizes)


def _mixer(config: Mapping[str, Any], kind: str, *, delta: KimiDeltaShape) -> nn.Module:
    if kind == "full_attention":
        return latent_attention(config)
    mixer = KimiDeltaAttention(delta)
    mixer.A_log = nn.Parameter(torch.zeros(1, 1, delta.num_heads, 1))  # the shape it has in the checkpoint
    return mixer
