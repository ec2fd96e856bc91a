"""Tiny random checkpoints of Kimi-Linear and Ling 3, written and read by transformers' own classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints_mamba import SIZES, draw, save

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
TYPES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
KIMI = SIZES | LATENT | {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": TYPES, "rms_norm_eps": 2e-5}
LING = (
    SIZES
    | LATENT
    | {
        "head_dim": 6,
        "layer_group_size": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "rope_theta": 10_000.0,
        "num_mtp_layers": 0,
    }
)
MODELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI),
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridConfig", LING),
}


def write(folder: Path, kind: str, single: str | None = None, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint of model type ``kind``; ``single`` gives one mixing layer of that kind."""
    model_class, config_class, settings = MODELS[kind]
    one = {"num_hidden_layers": 1, "layer_types": [single]} if single else {}
    drawn = draw if kind == "kimi_linear" else draw_bounded
    return save(folder, model_class, config_class, settings | one | overrides, seed, drawn)


def draw_bounded(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The same where a gate is ``-5 sigmoid(exp(A_log) (f + dt_bias))``, which decays slowly if its argument is low."""
    drawn = draw(name, shape, seed)
    if name.endswith("A_log"):
        return drawn - drawn.mean()
    return drawn - 5.0 if name.endswith("dt_bias") else drawn
