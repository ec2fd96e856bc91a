"""What Qwen's hybrid text models share: three Gated DeltaNet layers to one gated full-attention layer, pre-norm blocks.

A model's own file says which feed-forward parts it has, how its checkpoint's names differ, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from hypic.engine.layers.attention import Attention
from hypic.engine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.routers import SoftmaxRouter
from hypic.engine.models._config import layer_numbers, read, refuse_all_but, rotary_from, types_from
from hypic.engine.models._decoder import PreNormBlock, TextDecoder
from hypic.engine.models._experts import place_expert
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement

REFUSED = {"hidden_act": "silu", "attention_bias": False}
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


class QwenDecoder(TextDecoder):
    """A decoder of such blocks; made by ``assemble``."""

    def place(self, name: str) -> Placement | None:
        """Where a tensor belongs that Qwen3.5 and Qwen3-Next name alike, experts fused or one by one."""
        for prefix in TEXT_PREFIXES:
            name = name.removeprefix(prefix)
        if self.is_tied_head(name):
            return None
        name = name.replace(".linear_attn.", ".mixer.").replace(".self_attn.", ".mixer.")
        return place_expert(name, self) or Placement(name)


Made = TypeVar("Made", bound=QwenDecoder)


def assemble(cls: type[Made], config: Mapping[str, Any], mlps: Sequence[nn.Module]) -> Made:
    """The model of a ``config.json``, given every layer's feed-forward part.

    Raises:
        UnsupportedModel: a feature we do not compute.
        CheckpointError: a field is missing.
    """
    refuse_all_but(config, REFUSED)
    size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
    types = types_from(config, int(config.get("full_attention_interval") or 4))
    numbers = layer_numbers(types, ("linear_attention", "full_attention"))
    mixers = [_attention(config) if t == "full_attention" else GatedDeltaNet(delta_shape(config)) for t in types]
    parts = zip(mixers, numbers, mlps, strict=True)
    blocks = [PreNormBlock(*part, size, eps, zero_centred=True) for part in parts]
    rotary = rotary_from(config, read(config, "head_dim", int), default_factor=0.25)
    return cls.of_blocks(config, types, blocks, RMSNorm(size, eps, zero_centred=True), rotary)


def delta_shape(config: Mapping[str, Any]) -> DeltaNetShape:
    return DeltaNetShape(
        hidden_size=read(config, "hidden_size", int),
        num_k_heads=read(config, "linear_num_key_heads", int),
        num_v_heads=read(config, "linear_num_value_heads", int),
        head_k_dim=read(config, "linear_key_head_dim", int),
        head_v_dim=read(config, "linear_value_head_dim", int),
        conv_width=read(config, "linear_conv_kernel_dim", int),
        eps=read(config, "rms_norm_eps", float),
    )


def _attention(config: Mapping[str, Any]) -> Attention:
    eps, width = read(config, "rms_norm_eps", float), read(config, "head_dim", int)
    return attention(config, head_dim=width, gated=True, norm_eps=eps)


def dense_mlp(config: Mapping[str, Any]) -> SwiGLU:
    return SwiGLU(read(config, "hidden_size", int), read(config, "intermediate_size", int))


def sparse_mlp(config: Mapping[str, Any], *, renormalise: bool) -> MoE:
    """Softmax-routed experts beside a shared expert behind a sigmoid gate."""
    size, num_experts = read(config, "hidden_size", int), read(config, "num_experts", int)
    return MoE(
        SoftmaxRouter(num_experts, read(config, "num_experts_per_tok", int), size, renormalise=renormalise),
        Experts(num_experts, size, read(config, "moe_intermediate_size", int)),
        SwiGLU(size, read(config, "shared_expert_intermediate_size", int)),
        nn.Linear(size, 1, bias=False),
    )
