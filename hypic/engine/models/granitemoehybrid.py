"""Granite 4: Mamba-2 layers with a few attention layers between them, dense or with experts; most without positions.

Four numbers scale the model: embeddings, attention scores (in place of ``1 / sqrt(head_dim)``), both branches of every
block, and logits (a divisor). Experts stand beside a shared feed-forward part; with no experts it is all there is. The
models without Mamba-2 layers of this type load as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hypic.engine.layers.mamba2 import Mamba2Mixer
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary
from hypic.engine.layers.routers import SoftmaxRouter
from hypic.engine.models._config import head_dim, layer_numbers, read, refuse_all_but, rotary_from
from hypic.engine.models._decoder import PreNormBlock, TextDecoder, renamed
from hypic.engine.models._mamba import mamba2_shape, modern_types
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement, Placements
from hypic.errors import UnsupportedModel

RENAMED = (
    (".mamba.", ".mixer."),
    (".self_attn.", ".mixer."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
)


class Model(TextDecoder):
    """See the module's docstring."""

    embedding_multiplier: float
    logits_scaling: float
    has_experts: bool
    shared_size: int

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
        types = modern_types(config.get("layer_types") or ["linear_attention"] * count, config)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        scale = float(config.get("residual_multiplier", 1.0))
        blocks = [
            PreNormBlock(_mixer(config, kind), number, _mlp(config), size, eps, scale)
            for kind, number in zip(types, numbers, strict=True)
        ]
        model = cls.of_blocks(config, types, blocks, RMSNorm(size, eps), _rotary(config))
        model.embedding_multiplier = float(config.get("embedding_multiplier", 1.0))
        model.logits_scaling = float(config.get("logits_scaling", 1.0))
        model.has_experts = bool(config.get("num_local_experts"))
        model.shared_size = read(config, "shared_intermediate_size", int)
        return model

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.embedding_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / self.logits_scaling

    def map_weights(self, name: str) -> Placements:
        name = name.removeprefix("model.")
        if self.is_tied_head(name):
            return None
        name = renamed(name, RENAMED)
        shared = ".mlp.shared_expert." if self.has_experts else ".mlp."
        name = name.replace(".shared_mlp.output_linear.", f"{shared}down_proj.")
        if ".shared_mlp.input_linear." not in name:
            return Placement(name)
        gate, up = (name.replace(".shared_mlp.input_linear.", f"{shared}{part}_proj.") for part in ("gate", "up"))
        width = self.shared_size
        return [Placement(gate, rows=slice(0, width)), Placement(up, rows=slice(width, 2 * width))]


REFUSED = {"hidden_act": "silu", "normalization_function": "rmsnorm"}


def _mixer(config: Mapping[str, Any], kind: str) -> nn.Module:
    if kind == "linear_attention":
        return Mamba2Mixer(mamba2_shape(config))
    return attention(config, scale=float(config.get("attention_multiplier", 1.0)))


def _mlp(config: Mapping[str, Any]) -> nn.Module:
    size, num_experts = read(config, "hidden_size", int), int(config.get("num_local_experts") or 0)
    shared = SwiGLU(size, read(config, "shared_intermediate_size", int))
    if not num_experts:
        return shared
    # The softmax of the chosen logits is the softmax of all of them, renormalised.
    router = SoftmaxRouter(num_experts, read(config, "num_experts_per_tok", int), size, renormalise=True)
    return MoE(router, Experts(num_experts, size, read(config, "intermediate_size", int)), shared)


def _rotary(config: Mapping[str, Any]) -> Rotary | None:
    kind = config.get("position_embedding_type")
    if kind in (None, "nope"):
        return None
    if kind != "rope":
        raise UnsupportedModel(f"position_embedding_type {kind!r} is not supported; only 'rope' and 'nope' are.")
    return rotary_from(config, head_dim(config), default_factor=1.0)
