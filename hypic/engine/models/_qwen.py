"""What Qwen's hybrid text models share: three Gated DeltaNet layers to one gated full-attention layer, pre-norm blocks.

A model's own file says which feed-forward parts it has, how its checkpoint's names differ, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from hypic.engine.layers.attention import Attention, HeadShape
from hypic.engine.layers.decoder import Decoder, Step, run_mixer
from hypic.engine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE, SoftmaxRouter
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.models._config import context_from, layer_numbers, read, refuse_unless, rotary_from, types_from
from hypic.engine.models._experts import place_expert
from hypic.engine.weights import Placement

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


class Block(nn.Module):
    """``h += mixer(norm(h)); h += mlp(norm(h))``."""

    def __init__(self, mixer: nn.Module, layer: int, hidden_size: int, eps: float, mlp: nn.Module) -> None:
        super().__init__()
        self.mixer, self.layer = mixer, layer
        self.input_layernorm = RMSNorm(hidden_size, eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, zero_centred=True)
        self.mlp = mlp

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        mixed = run_mixer(self.mixer, self.input_layernorm(hidden), step, self.layer)
        normed, hidden = self.post_attention_layernorm.after(step.kept(hidden), mixed)
        out: Tensor = hidden + self.mlp(normed)
        return out


class QwenDecoder(Decoder):
    """A decoder of such blocks; made by ``assemble``."""

    layer_types: Sequence[str]
    max_context: int

    def place(self, name: str) -> Placement | None:
        """Where a tensor belongs that Qwen3.5 and Qwen3-Next name alike, experts fused or one by one."""
        for prefix in TEXT_PREFIXES:
            name = name.removeprefix(prefix)
        if name == "lm_head.weight" and self.lm_head.weight is self.embed_tokens.weight:
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
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "attention_bias", False)
    size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
    types = types_from(config, int(config.get("full_attention_interval") or 4))
    numbers = layer_numbers(types, ("linear_attention", "full_attention"))
    mixers = [_attention(config) if t == "full_attention" else GatedDeltaNet(delta_shape(config)) for t in types]
    blocks = [Block(m, n, size, eps, mlp) for m, n, mlp in zip(mixers, numbers, mlps, strict=True)]
    rotary = rotary_from(config, read(config, "head_dim", int), default_factor=0.25)
    norm = RMSNorm(size, eps, zero_centred=True)
    tied = bool(config.get("tie_word_embeddings", False))
    model = cls(read(config, "vocab_size", int), size, blocks, norm, rotary, tied=tied)
    model.layer_types, model.max_context = types, context_from(config)
    return model


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
    return Attention(
        HeadShape(
            hidden_size=read(config, "hidden_size", int),
            num_heads=read(config, "num_attention_heads", int),
            num_kv_heads=read(config, "num_key_value_heads", int),
            head_dim=read(config, "head_dim", int),
            gated=True,
            norm_eps=read(config, "rms_norm_eps", float),
        )
    )


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
