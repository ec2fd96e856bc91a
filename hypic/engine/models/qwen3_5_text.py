"""Qwen3.5, dense, text part: three Gated DeltaNet layers to one gated full-attention layer.

Also loads the multimodal checkpoints' text weights (``model.language_model.*``); vision and multi-token-prediction
weights are left out. With text alone all components of the multimodal rotary positions are equal, which is plain
partial rotary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hypic.engine.layers.attention import Attention, HeadShape
from hypic.engine.layers.decoder import Decoder, Step, run_mixer
from hypic.engine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary
from hypic.engine.models._config import layer_numbers, read, refuse_unless, rotary_from
from hypic.engine.weights import Placement

LEFT_OUT = ("mtp.", "model.visual.", "visual.", "model.mtp.")


class Block(nn.Module):
    """``h += mixer(norm(h)); h += mlp(norm(h))``."""

    def __init__(self, mixer: nn.Module, layer: int, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.mixer, self.layer = mixer, layer
        self.input_layernorm = RMSNorm(hidden_size, eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, zero_centred=True)
        self.mlp = SwiGLU(hidden_size, intermediate_size)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        hidden = step.kept(hidden) + run_mixer(self.mixer, self.input_layernorm(hidden), step, self.layer)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


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
        refuse_unless(config, "attention_bias", False)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        types = list(config.get("layer_types") or _default_types(config))
        width = read(config, "intermediate_size", int)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        blocks = [Block(_mixer(config, t), n, size, width, eps) for t, n in zip(types, numbers, strict=True)]
        head_dim = read(config, "head_dim", int)
        rotary: Rotary = rotary_from(config, head_dim, default_factor=0.25)
        norm = RMSNorm(size, eps, zero_centred=True)
        tied = bool(config.get("tie_word_embeddings", False))
        model = cls(read(config, "vocab_size", int), size, blocks, norm, rotary, tied=tied)
        model.layer_types, model.max_context = types, read(config, "max_position_embeddings", int)
        return model

    def map_weights(self, name: str) -> Placement | None:
        if name.startswith(LEFT_OUT):
            return None
        for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
            name = name.removeprefix(prefix)
        if name == "lm_head.weight" and self.lm_head.weight is self.embed_tokens.weight:
            return None
        return Placement(name.replace(".linear_attn.", ".mixer.").replace(".self_attn.", ".mixer."))


def _mixer(config: Mapping[str, Any], kind: str) -> nn.Module:
    return _attention(config) if kind == "full_attention" else GatedDeltaNet(_delta(config))


def _default_types(config: Mapping[str, Any]) -> list[str]:
    interval = int(config.get("full_attention_interval", 4))
    count = read(config, "num_hidden_layers", int)
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]


def _delta(config: Mapping[str, Any]) -> DeltaNetShape:
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
