"""Nemotron-H and Nemotron 3: blocks of one part each, Mamba-2, attention without positions, feed-forward or experts.

``h += f(norm(h))``. Feed-forward parts are not gated: ``W_down relu(W_up x)^2``. Experts are chosen by sigmoid scores
within groups, may work in a smaller latent space, and stand beside a shared one. A step of Mamba-2 is clamped to
``time_step_limit``, which released checkpoints leave open, as the code they bring along does; transformers 5.24 clamps
it from below by ``time_step_min`` instead, in prefill but not when it generates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.layers.attention import Attention
from hypic.engine.layers.decoder import Step, run_mixer
from hypic.engine.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from hypic.engine.layers.moe import UngatedExperts
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.routers import SigmoidRouter
from hypic.engine.models._config import head_dim, read, refuse_all_but, refuse_unless
from hypic.engine.models._decoder import TextDecoder, renamed
from hypic.engine.models._experts import sigmoid_router
from hypic.engine.models._mamba import modern_types, time_step_limit
from hypic.engine.models._mixers import attention
from hypic.engine.weights import Placement
from hypic.errors import UnsupportedModel

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
EXPERT = re.compile(r"(.*\.experts\.(?:up|down)_proj)|(.*\.experts)\.(\d+)\.(up|down)_proj\.weight")
RENAMED = (
    ("embeddings.", "embed_tokens."),
    ("norm_f.", "norm."),
    (".e_score_correction_bias", ".expert_bias"),
    (".shared_experts.", ".shared_expert."),
)


class SquaredReLU(nn.Module):
    """``down(relu(up(x))^2)``."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.relu(self.up_proj(x)).square())
        return out


class LatentMoE(nn.Module):
    """Routed experts, between projections to and from a latent space if there is one, and a shared expert."""

    def __init__(self, gate: SigmoidRouter, experts: UngatedExperts, shared: nn.Module, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = gate, experts, shared
        self.is_latent = sizes[0] != sizes[1]
        if self.is_latent:
            self.fc1_latent_proj = nn.Linear(sizes[0], sizes[1], bias=False)
            self.fc2_latent_proj = nn.Linear(sizes[1], sizes[0], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        routed: Tensor = self.experts(self.fc1_latent_proj(x) if self.is_latent else x, weights, chosen)
        out: Tensor = (self.fc2_latent_proj(routed) if self.is_latent else routed) + self.shared_expert(x)
        return out


class Block(nn.Module):
    """``h += f(norm(h))``; ``layer`` is ``None`` where ``f`` mixes no tokens."""

    def __init__(self, mixer: nn.Module, layer: int | None, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.mixer, self.layer = mixer, layer
        self.norm = RMSNorm(hidden_size, eps)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        if self.layer is None:
            hidden = step.kept(hidden)
            out: Tensor = hidden + self.mixer(self.norm(hidden))
            return out
        return step.kept(hidden) + run_mixer(self.mixer, self.norm(hidden), step, self.layer)


class Model(TextDecoder):
    """See the module's docstring."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        size, eps, types = read(config, "hidden_size", int), read(config, "layer_norm_epsilon", float), _types(config)
        blocks = []
        for depth, kind in enumerate(types):
            mixes = kind in ("linear_attention", "full_attention")
            blocks.append(Block(PARTS[kind](config), types[:depth].count(kind) if mixes else None, size, eps))
        return cls.of_blocks(config, types, blocks, RMSNorm(size, eps), None)

    def mixers(self) -> list[Any]:
        return [block.mixer for block in self.layers if block.layer is not None]

    def map_weights(self, name: str) -> Placement | None:
        if name.startswith(("mtp.", "model.mtp.", "backbone.mtp.")):
            return None
        name = name.removeprefix("backbone.").removeprefix("model.")
        if self.is_tied_head(name):
            return None
        name = renamed(name, RENAMED)
        expert = EXPERT.fullmatch(name)
        if expert is None or expert[1]:
            return Placement(name)
        return Placement(f"{expert[2]}.{expert[4]}_proj", (int(expert[3]),))


# Mamba-2's, attention's and the feed-forward parts' activations and biases, and windows.
REFUSED = {
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "sliding_window": None,
}


def _types(config: Mapping[str, Any]) -> list[str]:
    """From ``layers_block_type`` or the older pattern of one letter a layer.

    Raises:
        UnsupportedModel: a type or letter that is not known.
    """
    pattern = config.get("hybrid_override_pattern")
    given = config.get("layers_block_type") or config.get("layer_types") or [PATTERN.get(c, c) for c in pattern or ()]
    types = modern_types(given, config)
    unknown = [kind for kind in types if kind not in PARTS]
    if unknown or not types:
        raise UnsupportedModel(f"layer types {unknown or types} are not supported; supported are {', '.join(PARTS)}.")
    return types


def _mamba(config: Mapping[str, Any]) -> Mamba2Mixer:
    has_bias = bool(config.get("use_bias", False))
    return Mamba2Mixer(
        Mamba2Shape(
            hidden_size=read(config, "hidden_size", int),
            num_heads=read(config, "mamba_num_heads", int),
            head_dim=read(config, "mamba_head_dim", int),
            state_size=read(config, "ssm_state_size", int),
            num_groups=read(config, "n_groups", int),
            conv_width=read(config, "conv_kernel", int),
            eps=read(config, "layer_norm_epsilon", float),
            biases=(has_bias, bool(config.get("use_conv_bias", True)), has_bias),
            time_step_limit=time_step_limit(config),
        )
    )


def _attention(config: Mapping[str, Any]) -> Attention:
    # Files of the first generation name the head's size otherwise.
    return attention(config, head_dim=int(config.get("attention_head_dim") or head_dim(config)))


def _mlp(config: Mapping[str, Any], width: str = "intermediate_size") -> SquaredReLU:
    return SquaredReLU(read(config, "hidden_size", int), read(config, width, int), bool(config.get("mlp_bias", False)))


def _moe(config: Mapping[str, Any]) -> LatentMoE:
    refuse_unless(config, "mlp_bias", False)
    size, num_experts = read(config, "hidden_size", int), read(config, "n_routed_experts", int)
    latent = int(config.get("moe_latent_size") or size)
    router = sigmoid_router(config, num_experts)
    experts = UngatedExperts(num_experts, latent, read(config, "moe_intermediate_size", int))
    return LatentMoE(router, experts, _mlp(config, "moe_shared_expert_intermediate_size"), (size, latent))


PARTS = {"linear_attention": _mamba, "full_attention": _attention, "mlp": _mlp, "moe": _moe}
