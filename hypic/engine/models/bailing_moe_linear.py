"""Ring- and Ling-linear 2.0 and 2.5: Lightning attention with rotary keys, full attention in between, many experts.

The last layer of every ``layer_group_size`` attends, and so do the layers of an incomplete last group. Linear layers
norm q and k per head and rotate half a head. Full attention is grouped-query attention of the same kind in 2.0, and
latent attention with rotary keys (no norm of q and k, no gate) in 2.5, which is told by ``kv_lora_rank``; 2.5's files
share their ``model_type`` with Ling 3 and are told from it by their architecture. Experts are chosen by sigmoid scores
within groups; the first layers are dense. Decays are ALiBi's slopes times ``1 - i / (L - 1) + 1e-5``. Published sources
disagree about ``i`` for 2.0: it is the layer's number in the first Ring, and one less in later code and in 2.5, which
makes the factor of layer 0 exceed one. So it is a parameter of the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hypic.engine.layers.lightning_attention import GroupedLightningAttention, GroupedLightningShape, alibi_slopes
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary
from hypic.engine.models._config import (
    head_dim,
    layer_numbers,
    read,
    refuse_all_but,
    refuse_unless,
    rotary_from,
    types_from,
)
from hypic.engine.models._decoder import PreNormBlock, TextDecoder
from hypic.engine.models._experts import place_expert, sigmoid_router
from hypic.engine.models._mixers import attention, latent_attention, latent_rotary
from hypic.engine.weights import Placement, Placements
from hypic.errors import UnsupportedModel

# What is added to a layer's number in the factor of its decays, by the architecture that config.json names.
LAYER_OFFSETS = {
    "BailingMoeLinearForCausalLM": 0,
    "BailingMoeLinearV2ForCausalLM": -1,
    "BailingMoeV2_5ForCausalLM": -1,
}
LEFT_OUT = re.compile(r".*\.rotary_emb\.inv_freq|.*\.slope|mtp\..*|model\.mtp\..*")
LAYER = re.compile(r"layers\.(\d+)\.")
RENAMED = {"query_layernorm": "q_norm", "key_layernorm": "k_norm", "dense": "o_proj"}


class Model(TextDecoder):
    """See the module's docstring."""

    num_extra_layers: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        if config.get("kv_lora_rank") is not None:
            refuse_unless(config, "linear_silu", False)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        types = layer_types(config)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        blocks = [
            PreNormBlock(_mixer(config, kind, depth), number, _mlp(config, depth), size, eps)
            for depth, (kind, number) in enumerate(zip(types, numbers, strict=True))
        ]
        rotary = rotary_from(config, head_dim(config), default_factor=1.0)
        linear_rotary = rotary if config.get("linear_rope", True) else None
        rotary = rotary if config.get("kv_lora_rank") is None else _latent_rotary(config, rotary)
        model = cls.of_blocks(config, types, blocks, RMSNorm(size, eps), rotary, linear_rotary=linear_rotary)
        model.num_extra_layers = int(config.get("num_nextn_predict_layers") or 0)
        return model

    def map_weights(self, name: str) -> Placements:
        if LEFT_OUT.fullmatch(name):
            return None
        name = name.removeprefix("model.").replace("word_embeddings.", "embed_tokens.")
        layer = LAYER.match(name)
        number = int(layer[1]) if layer else -1
        count = len(self.layer_types)
        if count <= number < count + self.num_extra_layers:
            return None
        if self.is_tied_head(name):
            return None
        name = name.replace(".attention.", ".mixer.").replace(".shared_experts.", ".shared_expert.")
        if ".mixer." in name and number < count and self.layer_types[number] == "full_attention":
            return self._attention(name)
        return place_expert(name, self) or Placement(name)

    def _attention(self, name: str) -> Placements:
        stem, part, last = name.rsplit(".", 2)
        if part != "query_key_value" or not hasattr(self.get_submodule(stem), "k_proj"):
            return Placement(f"{stem}.{RENAMED.get(part, part)}.{last}")
        widths = [len(self.get_parameter(f"{stem}.{p}_proj.weight")) for p in "qkv"]
        ends = [sum(widths[: n + 1]) for n in range(3)]
        return [
            Placement(f"{stem}.{p}_proj.{last}", rows=slice(end - width, end))
            for p, width, end in zip("qkv", widths, ends, strict=True)
        ]


REFUSED = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "score_function": "sigmoid",
    "rope_interleave": True,
    "sliding_window": None,
}


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """As given; else the last layer of a group attends, and all layers of an incomplete last group."""
    if config.get("layer_types"):
        return types_from(config, interval=1)
    group, count = read(config, "layer_group_size", int), read(config, "num_hidden_layers", int)
    whole = count // group * group
    return ["full_attention" if (i + 1) % group == 0 or i >= whole else "linear_attention" for i in range(count)]


def layer_offset(config: Mapping[str, Any]) -> int:
    """0 or -1; 2.0's where the file names no architecture.

    Raises:
        UnsupportedModel: an architecture whose decays are not known.
    """
    names = list(config.get("architectures") or ["BailingMoeLinearV2ForCausalLM"])
    if names[0] not in LAYER_OFFSETS:
        known = " and ".join(LAYER_OFFSETS)
        raise UnsupportedModel(f"architecture {names[0]!r} has decays we do not know; known are {known}.")
    return LAYER_OFFSETS[names[0]]


def slopes(config: Mapping[str, Any], depth: int) -> Tensor:
    """A linear layer's decay slopes, ``[H]`` in float64 on the host."""
    span = max(read(config, "num_hidden_layers", int) - 1, 1)
    factor = 1 - (depth + layer_offset(config)) / span + 1e-5
    heads = read(config, "num_attention_heads", int)
    return torch.tensor(alibi_slopes(heads), dtype=torch.float64, device="cpu") * factor


def _mixer(config: Mapping[str, Any], kind: str, depth: int) -> nn.Module:
    size, heads = read(config, "hidden_size", int), read(config, "num_attention_heads", int)
    eps, has_norm = read(config, "rms_norm_eps", float), bool(config.get("use_qk_norm", False))
    if kind == "full_attention" and config.get("kv_lora_rank") is not None:
        return latent_attention(config)
    if kind == "full_attention":
        return attention(config, norm_eps=eps if has_norm else None, norm_centred=False)
    groups, silu = int(config.get("group_norm_size") or 1), bool(_linear_silu(config))
    linear = GroupedLightningShape(size, heads, head_dim(config), groups, eps, has_norm=has_norm, silu=silu)
    return GroupedLightningAttention(linear, slopes(config, depth))


def _latent_rotary(config: Mapping[str, Any], plain: Rotary) -> Rotary:
    """Positions of the key that heads share, over all of it: the same angles as those of the linear layers.

    Raises:
        UnsupportedModel: positions are scaled, or the shared key is wider or narrower than what linear layers rotate.
    """
    rotary = latent_rotary(config)
    if plain.dim != rotary.dim:
        raise UnsupportedModel(
            f"qk_rope_head_dim is {rotary.dim} where partial_rotary_factor rotates {plain.dim} channels of a head; "
            "published code takes one set of angles for both, so they must agree: fix config.json."
        )
    return rotary


def _linear_silu(config: Mapping[str, Any]) -> object:
    return config.get("use_linear_silu", config.get("linear_silu", False))


def _mlp(config: Mapping[str, Any], depth: int) -> nn.Module:
    size, num_experts = read(config, "hidden_size", int), int(config.get("num_experts") or 0)
    if not num_experts or depth < int(config.get("first_k_dense_replace") or 0):
        return SwiGLU(size, read(config, "intermediate_size", int))
    width, num_shared = read(config, "moe_intermediate_size", int), int(config.get("num_shared_experts") or 0)
    shared_width = num_shared * int(config.get("moe_shared_expert_intermediate_size") or width)
    has_bias = bool(config.get("moe_router_enable_expert_bias", False))
    router = sigmoid_router(config, num_experts, has_bias=has_bias)
    return MoE(router, Experts(num_experts, size, width), SwiGLU(size, shared_width) if num_shared else None)
