"""What Kimi-Linear and Ling 3 share: delta attention, latent attention, sigmoid-routed experts, pre-norm blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hypic.engine.layers.decoder import Step, run_mixer
from hypic.engine.layers.kimi_delta_attention import KimiDeltaShape
from hypic.engine.layers.mla import LatentAttention, LatentShape
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE, SigmoidRouter
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.models._config import read
from hypic.engine.weights import Index, Placement, Placements
from hypic.errors import CheckpointError

NAMED_EITHER_WAY = {
    "num_experts": "num_local_experts",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_nextn_predict_layers": "num_mtp_layers",
}


class Block(nn.Module):
    """``h += mixer(norm(h)); h += mlp(norm(h))``."""

    def __init__(self, mixer: nn.Module, layer: int, mlp: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.mixer, self.layer, self.mlp = mixer, layer, mlp
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        mixed = run_mixer(self.mixer, self.input_layernorm(hidden), step, self.layer)
        normed, hidden = self.post_attention_layernorm.after(step.kept(hidden), mixed)
        out: Tensor = hidden + self.mlp(normed)
        return out


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with transformers' names for what released files name otherwise."""
    return {NAMED_EITHER_WAY.get(name, name): value for name, value in config.items()}


def latent_attention(config: Mapping[str, Any], *, gated: bool) -> LatentAttention:
    rank = config.get("q_lora_rank")
    return LatentAttention(
        LatentShape(
            hidden_size=read(config, "hidden_size", int),
            num_heads=read(config, "num_attention_heads", int),
            latent_size=read(config, "kv_lora_rank", int),
            key_dim=read(config, "qk_nope_head_dim", int),
            rotary_dim=read(config, "qk_rope_head_dim", int),
            value_dim=read(config, "v_head_dim", int),
            query_rank=None if rank is None else int(rank),
            gated=gated,
            bias=bool(config.get("attention_bias", False)),
        )
    )


def dense_layers(config: Mapping[str, Any], default: int) -> list[bool]:
    """For every layer, whether its feed-forward part is dense; the first ``first_k_dense_replace`` are.

    Raises:
        CheckpointError: there are not as many types as layers.
    """
    count, given = read(config, "num_hidden_layers", int), config.get("mlp_layer_types")
    if given and len(given) != count:
        raise CheckpointError(f"config.json names {len(given)} mlp_layer_types for {count} layers; fix the file.")
    if given:
        return [kind == "dense" for kind in given]
    first = config.get("first_k_dense_replace")
    return [depth < (default if first is None else int(first)) for depth in range(count)]


def mlp(config: Mapping[str, Any], is_dense: bool) -> nn.Module:
    size, width = read(config, "hidden_size", int), read(config, "moe_intermediate_size", int)
    if is_dense:
        return SwiGLU(size, read(config, "intermediate_size", int))
    num_experts, num_shared = read(config, "num_local_experts", int), int(config.get("n_shared_experts") or 0)
    router = SigmoidRouter(
        num_experts,
        read(config, "num_experts_per_tok", int),
        size,
        num_groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        renormalise=bool(config.get("norm_topk_prob", True)),
    )
    return MoE(router, Experts(num_experts, size, width), SwiGLU(size, width * num_shared) if num_shared else None)


def place_mixer(stem: str, part: str, last: str, shape: KimiDeltaShape) -> Placements:
    """Where a tensor ``stem.part.last`` of a Kimi delta attention layer belongs: q, k and v side by side."""
    thirds: dict[str, Index] = {
        letter: (slice(number * shape.width, (number + 1) * shape.width),) for number, letter in enumerate("qkv")
    }
    letter, _, kind = part.partition("_")
    if letter in thirds and kind in ("proj", "conv1d"):
        return Placement(f"{stem}.{'qkv_proj' if kind == 'proj' else 'conv1d'}.{last}", thirds[letter])
    if kind in ("a_proj", "b_proj"):
        return Placement(f"{stem}.{letter}_proj.{kind}.{last}")
    return Placement(f"{stem}.{part}.{last}" if last else f"{stem}.{part}")


def is_extra_layer(name: str, count: int) -> bool:
    """Whether a tensor belongs to a layer behind the last: a head that predicts several tokens at once."""
    words: Sequence[str] = name.split(".")
    return words[0] == "layers" and words[1].isdigit() and int(words[1]) >= count
