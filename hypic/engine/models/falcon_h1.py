"""Falcon-H1: in every layer Mamba-2 and attention side by side, on the same normed input; their outputs are added.

``h += a mamba(norm(h)) + b attention(c norm(h)); h += mlp(norm(h))``. Fixed multipliers, part of the trained function,
stand at embeddings, logits, the input and the five parts of Mamba-2's projection, keys, the gate and the output of the
feed-forward part. Mamba-2 has a gate without a norm unless ``mamba_rms_norm`` asks for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.layers.attention import Attention
from hypic.engine.layers.decoder import Step, run_mixer
from hypic.engine.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.models._config import head_dim, read, refuse_all_but, rotary_from
from hypic.engine.models._decoder import TextDecoder
from hypic.engine.models._mamba import mamba2_shape
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement


class ScaledSwiGLU(nn.Module):
    """``scales[1] down(silu(scales[0] gate(x)) * up(x))``, without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, scales: Sequence[float]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.scales = tuple(scales)

    def forward(self, x: Tensor) -> Tensor:
        gated = F.silu(self.gate_proj(x) * self.scales[0]) * self.up_proj(x)
        out: Tensor = self.down_proj(gated) * self.scales[1]
        return out


class Block(nn.Module):
    """See the module's docstring; ``scales`` are those of Mamba-2's output, attention's output and its input."""

    def __init__(
        self, mamba: Mamba2Mixer, self_attn: Attention, depth: int, mlp: nn.Module, eps: float, scales: Sequence[float]
    ) -> None:
        super().__init__()
        self.mamba, self.self_attn, self.depth, self.feed_forward, self.scales = mamba, self_attn, depth, mlp, scales
        self.input_layernorm = RMSNorm(mamba.shape.hidden_size, eps)
        self.pre_ff_layernorm = RMSNorm(mamba.shape.hidden_size, eps)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        normed = self.input_layernorm(hidden)
        mamba_scale, attention_scale, attention_in = self.scales
        mixed = run_mixer(self.mamba, normed, step, self.depth) * mamba_scale
        mixed = mixed + run_mixer(self.self_attn, normed * attention_in, step, self.depth) * attention_scale
        hidden = step.kept(hidden) + mixed
        out: Tensor = hidden + self.feed_forward(self.pre_ff_layernorm(hidden))
        return out


class Model(TextDecoder):
    """See the module's docstring."""

    embedding_multiplier: float
    lm_head_multiplier: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        count = read(config, "num_hidden_layers", int)
        blocks = [_block(config, depth, size, eps) for depth in range(count)]
        rotary = rotary_from(config, head_dim(config), default_factor=1.0)
        model = cls.of_blocks(config, ["hybrid"] * count, blocks, RMSNorm(size, eps), rotary)
        model.embedding_multiplier = float(config.get("embedding_multiplier", 1.0))
        model.lm_head_multiplier = float(config.get("lm_head_multiplier", 1.0))
        return model

    def mixers(self) -> list[Any]:
        return [mixer for block in self.layers for mixer in (block.mamba, block.self_attn)]

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.embedding_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.lm_head_multiplier

    def map_weights(self, name: str) -> Placement | None:
        name = name.removeprefix("model.").replace("final_layernorm.", "norm.")
        if self.is_tied_head(name):
            return None
        return Placement(name)


REFUSED = {"hidden_act": "silu", "mlp_bias": False, "attn_layer_indices": None}


def _block(config: Mapping[str, Any], depth: int, size: int, eps: float) -> Block:
    names = ("ssm_out_multiplier", "attention_out_multiplier", "attention_in_multiplier")
    scales = [float(config.get(name, 1.0)) for name in names]
    mlp_scales = config.get("mlp_multipliers") or (1.0, 1.0)
    mlp = ScaledSwiGLU(size, read(config, "intermediate_size", int), mlp_scales)
    # Keys are multiplied before they are rotated, which is a scale of the scores.
    scale = head_dim(config) ** -0.5 * float(config.get("key_multiplier", 1.0))
    return Block(Mamba2Mixer(_mamba(config)), attention(config, scale=scale), depth, mlp, eps, scales)


def _mamba(config: Mapping[str, Any]) -> Mamba2Shape:
    has_norm, in_scale = bool(config.get("mamba_rms_norm", False)), float(config.get("ssm_in_multiplier", 1.0))
    biases = (bool(config.get("mamba_proj_bias")), bool(config.get("mamba_conv_bias", True)))
    return mamba2_shape(
        config,
        inner_size=config.get("mamba_d_ssm"),
        eps=read(config, "rms_norm_eps", float) if has_norm else None,
        is_norm_first=bool(config.get("mamba_norm_before_gate", True)),
        biases=(*biases, bool(config.get("projectors_bias"))),
        scales=(in_scale, *(config.get("ssm_multipliers") or (1.0,) * 5)),
    )
