"""Configurations of tiny models, one for every model type: four mixing layers or so, linear and full by turns.

They hold what the engine reads of a ``config.json`` and nothing else; weights are made up when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
TYPES = ["linear_attention", "full_attention"] * 2
COMMON: Config = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
DELTA: Config = {
    **COMMON,
    "layer_types": TYPES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN: Config = {
    **DELTA,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
EXPERTS: Config = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
ROUTED: Config = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT: Config = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "v_head_dim": 16}
MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
RING: Config = {
    **COMMON,
    **ROUTED,
    "architectures": ["BailingMoeLinearV2ForCausalLM"],
    "layer_group_size": 2,
    "group_norm_size": 2,
    "use_qk_norm": True,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}
# By model type, and by model type and name where one file builds two generations.
CONFIGS: Mapping[str, Config] = {
    "bailing_hybrid": {
        **COMMON,
        **ROUTED,
        **LATENT,
        "layer_group_size": 2,
        "qk_rope_head_dim": 8,
        "rope_theta": 10_000.0,
    },
    "bailing_moe_linear": RING,
    "bailing_moe_linear (2.5)": {
        **RING,
        **LATENT,
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "qk_rope_head_dim": 8,
    },
    "bamba": {**COMMON, **ROPE, **MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**COMMON, **ROPE, **MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **COMMON,
        **MAMBA,
        "layer_types": TYPES,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "attention_multiplier": 0.25,
    },
    "kimi_linear": {
        **COMMON,
        **ROUTED,
        **LATENT,
        "layer_types": TYPES,
        "qk_rope_head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "lfm2": {**COMMON, **ROPE, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "norm_eps": 1e-5},
    "minimax": {**COMMON, **ROPE, "layer_types": TYPES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        **COMMON,
        "num_hidden_layers": 8,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
    },
    "olmo_hybrid": {**DELTA, "num_key_value_heads": 4, "rope_parameters": None},
    "qwen3_5_moe_text": {**QWEN, **EXPERTS},
    "qwen3_5_text": QWEN,
    "qwen3_next": {**QWEN, **EXPERTS},
    "zamba2": {
        **COMMON,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_mem_blocks": 2,
        "num_key_value_heads": 4,
        "hidden_act": "gelu",
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "rope_theta": 10_000.0,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
    },
}


def config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model."""
    return {"model_type": name.partition(" ")[0], **CONFIGS[name]}
