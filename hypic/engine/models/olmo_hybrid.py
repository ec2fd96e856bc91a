"""OLMo-Hybrid: Gated DeltaNet with negative eigenvalues (``beta = 2 sigmoid(b)``), and multi-head attention.

Linear layers are pre-norm, ``h += f(norm(h))``; attention layers are post-norm, ``h += norm(f(h))``. Norms have plain
weights; those of q and k run over the whole width, before it is cut into heads. Released checkpoints have no positions
(``rope_theta`` is null); with a ``rope_theta`` positions are rotary over the whole head.

Projections and convolutions lie apart in the checkpoint and are put together here. Files written by transformers cut
the convolution in three equal parts, not into q, k and v: only its concatenation is right, so a part's place follows
from its own length. q and k are equally long either way: k lies behind as many rows as it has, and v ends last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hypic.engine.layers.decoder import Step, run_mixer
from hypic.engine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary
from hypic.engine.models._config import (
    head_dim,
    layer_numbers,
    read,
    refuse_all_but,
    rope_from,
    rotary_from,
    types_from,
)
from hypic.engine.models._decoder import PreNormBlock, TextDecoder
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement

LEFT_OUT = ("mtp.", "model.mtp.")
GATED_NORM_EPS = 1e-5  # whatever the configuration says of the other norms
RENAMED = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "g_proj": "in_proj_z",
    "b_proj": "in_proj_b",
    "a_proj": "in_proj_a",
    "o_norm": "norm",
    "o_proj": "out_proj",
}


class AttentionBlock(nn.Module):
    """``h += norm(mixer(h)); h += norm(mlp(h))``."""

    def __init__(self, mixer: nn.Module, layer: int, mlp: nn.Module, size: int, eps: float) -> None:
        super().__init__()
        self.mixer, self.layer, self.mlp = mixer, layer, mlp
        self.post_attention_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        mixed = run_mixer(self.mixer, hidden, step, self.layer)
        hidden = step.kept(hidden) + self.post_attention_layernorm(mixed)
        out: Tensor = hidden + self.post_feedforward_layernorm(self.mlp(hidden))
        return out


class Model(TextDecoder):
    """See the module's docstring."""

    delta: DeltaNetShape

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        types, width, delta = types_from(config, interval=4), read(config, "intermediate_size", int), _delta(config)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        blocks: list[nn.Module] = [
            AttentionBlock(_attention(config), number, SwiGLU(size, width), size, eps)
            if kind == "full_attention"
            else PreNormBlock(GatedDeltaNet(delta), number, SwiGLU(size, width), size, eps)
            for kind, number in zip(types, numbers, strict=True)
        ]
        model = cls.of_blocks(config, types, blocks, RMSNorm(size, eps), _rotary(config))
        model.delta = delta
        return model

    def map_weights(self, name: str) -> Placement | None:
        if name.startswith(LEFT_OUT):
            return None
        name = name.removeprefix("model.")
        if self.is_tied_head(name):
            return None
        if ".linear_attn." in name:
            return self._linear(name.replace(".linear_attn.", ".mixer."))
        words = name.replace(".self_attn.", ".mixer.").split(".")
        is_norm = words[-2:-1] and words[-2].endswith("layer_norm")
        return Placement(".".join([RENAMED.get(word, word) for word in words] if is_norm else words))

    def _linear(self, name: str) -> Placement:
        stem, part, last = name.rsplit(".", 2) if name.endswith(".weight") else (*name.rsplit(".", 1), "")
        channels, keys = self.delta.kept.conv_channels, self.delta.key_size
        projections = {"q_proj": slice(0, keys), "k_proj": slice(keys, 2 * keys), "v_proj": slice(2 * keys, channels)}
        convolutions = {
            "q_conv1d": lambda rows: (slice(0, rows),),
            "k_conv1d": lambda rows: (slice(rows, 2 * rows),),
            "v_conv1d": lambda rows: (slice(channels - rows, channels),),
        }
        if part in projections:
            return Placement(f"{stem}.in_proj_qkv.{last}", (projections[part],))
        if part in convolutions:
            return Placement(f"{stem}.conv1d.{last}", convolutions[part])
        return Placement(".".join(word for word in (stem, RENAMED.get(part, part), last) if word))


REFUSED = {"hidden_act": "silu", "attention_bias": False}


def _rotary(config: Mapping[str, Any]) -> Rotary | None:
    if rope_from(config).get("rope_theta") is None:
        return None
    return rotary_from(config, head_dim(config), default_factor=1.0)


def _attention(config: Mapping[str, Any]) -> nn.Module:
    return attention(config, norm_eps=read(config, "rms_norm_eps", float), norm_whole=True, norm_centred=False)


def _delta(config: Mapping[str, Any]) -> DeltaNetShape:
    """Sizes that a file leaves out follow from the hidden size: keys 0.75 of a head's share, values twice that."""
    size, heads = read(config, "hidden_size", int), read(config, "num_attention_heads", int)
    num_k_heads = int(config.get("linear_num_key_heads") or heads)
    head_k_dim = int(config.get("linear_key_head_dim") or 0.75 * size / num_k_heads)
    return DeltaNetShape(
        hidden_size=size,
        num_k_heads=num_k_heads,
        num_v_heads=int(config.get("linear_num_value_heads") or heads),
        head_k_dim=head_k_dim,
        head_v_dim=int(config.get("linear_value_head_dim") or 2 * head_k_dim),
        conv_width=int(config.get("linear_conv_kernel_dim") or 4),
        eps=GATED_NORM_EPS,
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )
