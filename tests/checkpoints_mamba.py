"""Tiny random checkpoints of models with Mamba-2 layers, and of LFM2, written and read by transformers' own classes.

Weights are drawn by name, so that every layer matters and states decay slowly: with fast decay, errors in a state
would hide. No two multipliers are alike, so that none can be mistaken for another.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

Draw = Callable[[str, torch.Size, int], Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
GRANITE = (
    SIZES
    | MAMBA
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 1.3,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.8,
        "logits_scaling": 1.7,
    }
)
BAMBA = SIZES | MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}
NEMOTRON = SIZES | {
    "head_dim": 16,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "full_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
    # transformers clamps steps from below by this in prefill, and by nothing when it generates.
    "time_step_min": 1e-30,
}
FALCON = (
    SIZES
    | MAMBA
    | {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "lm_head_multiplier": 0.7,
        "embedding_multiplier": 1.3,
        "mlp_multipliers": [0.8, 1.2],
        "key_multiplier": 0.6,
        "attention_out_multiplier": 0.9,
        "attention_in_multiplier": 1.1,
        "ssm_multipliers": [0.9, 1.15, 0.85, 1.25, 0.75],
        "ssm_in_multiplier": 1.4,
        "ssm_out_multiplier": 0.95,
    }
)
ZAMBA = SIZES | {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 5,
    "num_mem_blocks": 2,
    "num_key_value_heads": 4,
    "use_shared_attention_adapter": True,
    "adapter_rank": 6,
    "use_mem_rope": True,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "chunk_size": 64,
    "time_step_min": 1e-30,
}
LFM2 = SIZES | {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_L_cache": 3,
    "block_multiple_of": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}

# Per model type: transformers' model and configuration classes, settings, and those of one mixing layer of a kind.
MODELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE),
    "bamba": ("BambaForCausalLM", "BambaConfig", BAMBA),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", FALCON),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", ZAMBA),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", LFM2),
}
SINGLE: Mapping[str, dict[str, dict[str, Any]]] = {
    "granitemoehybrid": {
        kind: {"num_hidden_layers": 1, "layer_types": [kind]} for kind in ("linear_attention", "full_attention")
    },
    "bamba": {
        "linear_attention": {"num_hidden_layers": 1, "attn_layer_indices": []},
        "full_attention": {"num_hidden_layers": 1, "attn_layer_indices": [0]},
    },
    "nemotron_h": {
        "linear_attention": {"layers_block_type": ["moe", "linear_attention", "mlp"]},
        "full_attention": {"layers_block_type": ["moe", "full_attention", "mlp"]},
    },
    "falcon_h1": {"hybrid": {"num_hidden_layers": 1}},
    "zamba2": {"linear_attention": {"num_hidden_layers": 1, "layers_block_type": ["linear_attention"]}},
    "lfm2": {kind: {"num_hidden_layers": 1, "layer_types": [kind]} for kind in ("conv", "full_attention")},
}


def write(folder: Path, kind: str, single: str | None = None, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint of model type ``kind``; ``single`` gives one mixing layer of that kind."""
    model_class, config_class, settings = MODELS[kind]
    settings = settings | (SINGLE[kind][single] if single else {}) | overrides
    return save(folder, model_class, config_class, settings, seed)


def save(
    folder: Path,
    model_class: str,
    config_class: str,
    settings: Mapping[str, Any],
    seed: int = 0,
    drawn: Draw | None = None,
) -> Path:
    """A checkpoint of these settings, as transformers writes it, with weights of ``draw(name, shape, seed)``.

    The oldest transformers that hypic runs with lacks some of the models; what is tested beside them is skipped there.
    """
    import transformers

    if not hasattr(transformers, model_class):
        pytest.skip(f"transformers {transformers.__version__} has no {model_class}")
    with torch.random.fork_rng():
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    for name, tensor in tensors.items():
        tensor.data = (drawn or draw)(name, tensor.shape, seed).to(torch.float32)
    model.tie_weights()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    return folder


def draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    """A tensor's random values, float64, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("A_log"):
        return torch.log(0.005 + 0.045 * torch.rand(shape, generator=generator, dtype=torch.float64))
    if name.endswith("dt_bias") or "conv1d.weight" in name:
        return 0.5 * normal
    if "norm" in name.rsplit(".", 2)[-2] or name.endswith(".D"):
        return 1.0 + 0.2 * normal
    if name.endswith(("gate.weight", "router.weight")):
        return 2.0 * normal * shape[-1] ** -0.5  # far from ties
    return normal * math.sqrt(1 / shape[-1]) if len(shape) > 1 else 0.2 * normal


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as transformers loads it, in evaluation mode. Inside, much runs in float32 all the same."""
    from transformers import AutoModelForCausalLM

    kind = json.loads((folder / "config.json").read_text())
    has_experts = any(kind.get(name) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    options = {"experts_implementation": "eager"} if has_experts else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


@torch.no_grad()
def oracle_logits(folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Full recompute by transformers, ``[N, V]`` in float64."""
    output: Tensor = oracle(folder, dtype)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return output[0].to(torch.float64)


@torch.no_grad()
def exact_logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """The same with all that transformers fixes at float32 widened to float64; its code is left as it is."""
    model = oracle(folder, torch.float64).double()
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            dim = 2 * module.inv_freq.numel()
            theta = module.config.rope_parameters["rope_theta"]
            module.inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if "mup_vector" in dict(module.named_buffers(recurse=False)):
            module.mup_vector = _mup_vector(model.config)
    with _no_float32():
        output: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return output[0]


def _mup_vector(config: Any) -> Tensor:
    groups = config.mamba_n_groups * config.mamba_d_state
    sizes = (config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads)
    parts = [torch.full((n,), s, dtype=torch.float64) for n, s in zip(sizes, config.ssm_multipliers, strict=True)]
    return torch.cat(parts)[None, None]


@contextmanager
def _no_float32() -> Iterator[None]:
    """Casts to float32 give float64."""
    cast: Any = Tensor.to

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in options.items()}
        result: Tensor = cast(self, *widened, **named)
        return result

    def as_type(self: Tensor, dtype: torch.dtype) -> Tensor:
        return to(self, dtype)

    def double(self: Tensor) -> Tensor:
        return self.double()

    with patch.object(Tensor, "to", to), patch.object(Tensor, "float", double), patch.object(Tensor, "type", as_type):
        yield
