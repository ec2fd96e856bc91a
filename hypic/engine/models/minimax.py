"""MiniMax-Text-01 and M1: Lightning attention with a constant decay per head, softmax attention in between, experts.

The residual is the normed value: ``x = norm(h); h = alpha x + beta f(x)``, for the mixer and for the experts. Rotary
covers ``rotary_dim`` channels of a head, half of it in the released checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hypic.engine.layers.decoder import Step, run_mixer
from hypic.engine.layers.lightning_attention import LightningAttention, decay_slopes
from hypic.engine.layers.moe import SoftmaxMoE
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.models._config import head_dim, layer_numbers, read, refuse_all_but, rotary_from
from hypic.engine.models._decoder import TextDecoder
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement

BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
EXPERT = re.compile(r"(layers\.\d+\.)block_sparse_moe\.experts\.(\d+)\.(w1|w2|w3)\.weight")


class Block(nn.Module):
    """``scales`` are alpha and beta of the mixer, then of the experts."""

    def __init__(
        self, mixer: nn.Module, layer: int, mlp: SoftmaxMoE, size: int, eps: float, scales: Sequence[float]
    ) -> None:
        super().__init__()
        self.mixer, self.layer, self.mlp, self.scales = mixer, layer, mlp, tuple(scales)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        alpha, beta, mlp_alpha, mlp_beta = self.scales
        normed = self.input_layernorm(hidden)
        hidden = alpha * step.kept(normed) + beta * run_mixer(self.mixer, normed, step, self.layer)
        normed = self.post_attention_layernorm(hidden)
        out: Tensor = mlp_alpha * normed + mlp_beta * self.mlp(normed)
        return out


class Model(TextDecoder):
    """See the module's docstring."""

    intermediate_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        types = _types(config)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        blocks = [
            Block(_mixer(config, kind, depth), number, _experts(config), size, eps, _scales(config, kind))
            for depth, (kind, number) in enumerate(zip(types, numbers, strict=True))
        ]
        rotary = rotary_from(config, head_dim(config), default_factor=1.0)
        model = cls.of_blocks(config, types, blocks, RMSNorm(size, eps), rotary)
        model.intermediate_size = read(config, "intermediate_size", int)
        return model

    def map_weights(self, name: str) -> Placement | None:
        name = name.removeprefix("model.")
        if name.rsplit(".", 1)[-1] in BUFFERS:
            return None
        if self.is_tied_head(name):
            return None
        expert = EXPERT.fullmatch(name)
        if expert is None:
            return Placement(name.replace(".self_attn.", ".mixer.").replace(".block_sparse_moe.", ".mlp."))
        width, number = self.intermediate_size, int(expert[2])
        if expert[3] == "w2":
            return Placement(f"{expert[1]}mlp.experts.down_proj", (number,))
        half = slice(0, width) if expert[3] == "w1" else slice(width, 2 * width)
        return Placement(f"{expert[1]}mlp.experts.gate_up_proj", (number, half))


REFUSED = {"hidden_act": "silu", "sliding_window": None, "shared_intermediate_size": 0}


def _types(config: Mapping[str, Any]) -> list[str]:
    if config.get("layer_types"):
        return list(config["layer_types"])
    flags = read(config, "attn_type_list", list)
    return ["full_attention" if flag else "linear_attention" for flag in flags]


def _mixer(config: Mapping[str, Any], kind: str, depth: int) -> nn.Module:
    if kind == "full_attention":
        return attention(config)
    size, heads = read(config, "hidden_size", int), read(config, "num_attention_heads", int)
    factor = 1 - depth / (read(config, "num_hidden_layers", int) - 1 + 1e-5) + 1e-5
    return LightningAttention(size, heads, head_dim(config), decay_slopes(heads, factor))


def _experts(config: Mapping[str, Any]) -> SoftmaxMoE:
    return SoftmaxMoE(
        read(config, "num_local_experts", int),
        read(config, "num_experts_per_tok", int),
        read(config, "hidden_size", int),
        read(config, "intermediate_size", int),
    )


def _scales(config: Mapping[str, Any], kind: str) -> list[float]:
    """Released checkpoints name these ``layernorm_*``, transformers ``*_factor``."""
    mixer = "linear_attn" if kind == "linear_attention" else "full_attn"
    released = {
        "linear_attn": "layernorm_linear_attention",
        "full_attn": "layernorm_full_attention",
        "mlp": "layernorm_mlp",
    }
    return [
        float(config.get(f"{part}_{which}_factor", config.get(f"{released[part]}_{which}", 1.0)))
        for part in (mixer, "mlp")
        for which in ("alpha", "beta")
    ]
