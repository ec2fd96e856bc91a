"""Reads a checkpoint folder into a config and float64 blocks: safetensors and json, nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.reference.mixers import Attention, Block, Config, Experts, GatedDeltaNet, Lightning, Linear, SwiGLU, Weights


@dataclass(frozen=True)
class Network:
    """A model's parts, in order."""

    embedding: Tensor
    blocks: tuple[Block, ...]
    final_norm: Tensor
    head: Tensor
    eps: float


def read_config(folder: Path) -> dict[str, object]:
    """``config.json``; of a multimodal wrapper, its text part."""
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    text = config.get("text_config")
    return config if not isinstance(text, dict) else text


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors in float64 under text-model names."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: tensor.to(torch.float64) for name, tensor in load_file(file).items()}
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in weights.items()}


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def load(folder: Path) -> Network:
    """The network of a folder. ``ValueError`` for a model type other than the two known here."""
    config, weights = read_config(folder), read_weights(folder)
    builders = {"qwen3_5_text": _qwen_block, "minimax": _minimax_block}
    if config["model_type"] not in builders:
        raise ValueError(f"model_type {config['model_type']!r} is not known to the reference.")
    build, qwen = builders[str(config["model_type"])], config["model_type"] == "qwen3_5_text"
    types = _layer_types(config)
    blocks = tuple(build(config, under(weights, f"model.layers.{i}."), i, kind) for i, kind in enumerate(types))
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    return Network(embedding, blocks, weights["model.norm.weight"] + (1.0 if qwen else 0.0), head, blocks[0].eps)


def _layer_types(config: Config) -> list[str]:
    if config.get("layer_types"):
        return list(config["layer_types"])
    every = config["full_attention_interval"]
    count = range(1, config["num_hidden_layers"] + 1)
    return ["linear_attention" if i % every else "full_attention" for i in count]


def _qwen_block(config: Config, w: Weights, layer_idx: int, kind: str) -> Block:
    mixer: Linear | Attention
    if kind == "linear_attention":
        mixer = GatedDeltaNet(config, under(w, "linear_attn."))
    else:
        mixer = Attention(config, under(w, "self_attn."), gated=True)
    mlp = SwiGLU(*(w[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
    return Block(mixer, mlp, w, float(config["rms_norm_eps"]), offset=1.0)


def _minimax_block(config: Config, w: Weights, layer_idx: int, kind: str) -> Block:
    mixer: Linear | Attention
    if kind == "linear_attention":
        mixer, name = Lightning(config, under(w, "self_attn."), layer_idx), "linear_attn"
    else:
        mixer, name = Attention(config, under(w, "self_attn."), gated=False), "full_attn"
    alpha = (float(config[f"{name}_alpha_factor"]), float(config["mlp_alpha_factor"]))
    beta = (float(config[f"{name}_beta_factor"]), float(config["mlp_beta_factor"]))
    experts = Experts(config, under(w, "block_sparse_moe."))
    return Block(mixer, experts, w, float(config["rms_norm_eps"]), post_norm=True, alpha=alpha, beta=beta)
