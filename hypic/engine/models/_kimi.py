"""What Kimi-Linear and Ling 3 share: delta and latent attention in pre-norm blocks, experts chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import nn

from hypic.engine.layers.kimi_delta_attention import KimiDeltaShape
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import MOVES_NO_GATE, Rotary
from hypic.engine.models._config import layer_numbers, read
from hypic.engine.models._decoder import PreNormBlock, TextDecoder
from hypic.engine.models._experts import sigmoid_router
from hypic.engine.weights import Index, Placement, Placements
from hypic.errors import CheckpointError, UnsupportedModel

NAMED_EITHER_WAY = {
    "num_experts": "num_local_experts",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_nextn_predict_layers": "num_mtp_layers",
}


class KimiDecoder(TextDecoder):
    """Such blocks; ``delta`` are the sizes of the linear layers."""

    delta: KimiDeltaShape

    @classmethod
    def of_layers(
        cls,
        config: Mapping[str, Any],
        types: Sequence[str],
        mixer: Callable[[str], nn.Module],
        delta: KimiDeltaShape,
        num_dense: int,
        rotary: Rotary | None,
    ) -> Self:
        """From the types of the layers and what makes a mixer of each; ``num_dense`` where the file leaves it out.

        Raises:
            UnsupportedModel: a type that is not known, or linear layers with positions.
            CheckpointError: a field is missing.
        """
        if config.get("linear_rope"):
            raise UnsupportedModel(MOVES_NO_GATE)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        numbers = layer_numbers(types, ("linear_attention", "full_attention"))
        blocks = [
            PreNormBlock(mixer(kind), number, mlp(config, is_dense), size, eps)
            for kind, number, is_dense in zip(types, numbers, dense_layers(config, num_dense), strict=True)
        ]
        model = cls.of_blocks(config, types, blocks, RMSNorm(size, eps), rotary)
        model.delta = delta
        return model


def with_known_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with transformers' names for what released files name otherwise."""
    return {NAMED_EITHER_WAY.get(name, name): value for name, value in config.items()}


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
    shared = SwiGLU(size, width * num_shared) if num_shared else None
    return MoE(sigmoid_router(config, num_experts), Experts(num_experts, size, width), shared)


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
