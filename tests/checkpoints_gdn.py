"""Tiny random checkpoints of further families: Qwen3-Next, Qwen3.5 with experts, OLMo-Hybrid, Ring-linear 2.0.

The first three are built, saved and read back by transformers' own classes. Ring-linear is in no release of
transformers: its files are written here from its published names, and its reference is ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.checkpoints import QWEN, VISION, LayerType, _fresh, _no_float32, draw

SPARSE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
OLMO: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "rope_parameters": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
RING: dict[str, Any] = {
    "model_type": "bailing_moe_linear",
    "architectures": ["BailingMoeLinearV2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_group_size": 2,  # linear, full, linear, full, and an incomplete group of one
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "group_norm_size": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "linear_silu": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10_000,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def qwen3_next(folder: Path, single: LayerType | None = None, **overrides: Any) -> Path:
    """``qwen3_next``: layer 1 is dense, the others have experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    settings = QWEN | SPARSE | {"mlp_only_layers": [1]} | _single(single) | overrides
    return _save(_fresh(Qwen3NextForCausalLM, Qwen3NextConfig(**settings)), folder)


def qwen3_5_moe(folder: Path, single: LayerType | None = None, *, wrapper: bool = False, **overrides: Any) -> Path:
    """``qwen3_5_moe_text``, or the multimodal ``qwen3_5_moe`` around the same text model."""
    from transformers import (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeTextConfig,
    )

    settings = QWEN | SPARSE | _single(single) | overrides
    if not wrapper:
        return _save(_fresh(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**settings)), folder)
    config = Qwen3_5MoeConfig(text_config=settings, vision_config=VISION)
    return _save(_fresh(Qwen3_5MoeForConditionalGeneration, config), folder)


def olmo_hybrid(folder: Path, single: LayerType | None = None, **overrides: Any) -> Path:
    """``olmo_hybrid``, without positions unless ``rope_parameters`` say so."""
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    saved = _save(_fresh(OlmoHybridForCausalLM, OlmoHybridConfig(**OLMO | overrides)), folder)
    # Its class takes no model of one kind of layer alone.
    return saved if single is None else keep_layer(saved, OLMO["layer_types"].index(single), single)


def ring(folder: Path, single: LayerType | None = None, **overrides: Any) -> Path:
    """``bailing_moe_linear``, written from its published names."""
    config = RING | _single(single) | overrides
    folder.mkdir(parents=True, exist_ok=True)
    shapes = dict(_ring_shapes(config, _ring_types(config)))
    tensors = {name: draw(_ring_name(name), torch.Size(shape), 0, zero_centred=False) for name, shape in shapes.items()}
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _ring_name(name: str) -> str:
    """The name that tells ``draw`` what kind of tensor it is."""
    return name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")


def _ring_types(config: dict[str, Any]) -> list[str]:
    if "layer_types" in config:
        return list(config["layer_types"])
    count, group = config["num_hidden_layers"], config["layer_group_size"]
    full = {i for i in range(count) if i % group == group - 1} | set(range(count - count % group, count))
    return ["full_attention" if i in full else "linear_attention" for i in range(count)]


def _ring_shapes(c: dict[str, Any], types: list[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    size, head, vocab = c["hidden_size"], c["head_dim"], c["vocab_size"]
    width, kv_width = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.word_embeddings.weight", (vocab, size)
    yield "lm_head.weight", (vocab, size)
    yield "model.norm.weight", (size,)
    for i, kind in enumerate(types):
        layer, linear = f"model.layers.{i}.", kind == "linear_attention"
        yield layer + "input_layernorm.weight", (size,)
        yield layer + "post_attention_layernorm.weight", (size,)
        yield layer + "attention.query_key_value.weight", (3 * width if linear else width + 2 * kv_width, size)
        yield layer + "attention.dense.weight", (size, width)
        yield layer + "attention.query_layernorm.weight", (head,)
        yield layer + "attention.key_layernorm.weight", (head,)
        if linear:
            yield layer + "attention.g_proj.weight", (width, size)
            yield layer + "attention.g_norm.weight", (width,)
        yield from _ring_mlp(c, layer + "mlp.", i < c["first_k_dense_replace"])


def _ring_mlp(c: dict[str, Any], stem: str, is_dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = c["hidden_size"]
    if is_dense:
        widths = {"": c["intermediate_size"]}
    else:
        yield stem + "gate.weight", (c["num_experts"], size)
        yield stem + "gate.expert_bias", (c["num_experts"],)
        widths = {f"experts.{e}.": c["moe_intermediate_size"] for e in range(c["num_experts"])}
        widths["shared_experts."] = c["moe_shared_expert_intermediate_size"]
    for part, width in widths.items():
        yield f"{stem}{part}gate_proj.weight", (width, size)
        yield f"{stem}{part}up_proj.weight", (width, size)
        yield f"{stem}{part}down_proj.weight", (size, width)


def _single(single: LayerType | None) -> dict[str, Any]:
    if single is None:
        return {}
    return {"num_hidden_layers": 1, "layer_types": [single], "mlp_only_layers": [], "first_k_dense_replace": 0}


def _save(model: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    centred = model.config.model_type != "olmo_hybrid"
    for name, parameter in model.named_parameters():
        name = name.replace("model.language_model.", "model.")
        parameter.data = draw(name, parameter.shape, 0, zero_centred=centred).float()
    model.tie_weights()
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return folder


# -- changing a folder -----------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Replaces a folder's tensors by ``change`` of them."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def configure(folder: Path, **changes: Any) -> Path:
    """Changes fields of ``config.json``."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def keep_layer(folder: Path, number: int, kind: LayerType) -> Path:
    """Makes a model of one of its layers."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: t for name, t in tensors.items() if not re.match(rf"model\.layers\.(?!{number}\.)", name)}
        return {name.replace(f"layers.{number}.", "layers.0."): tensor for name, tensor in kept.items()}

    configure(folder, num_hidden_layers=1, layer_types=[kind])
    return rewrite(folder, change)


def fuse_experts(folder: Path) -> Path:
    """Stores experts as one tensor a layer, the way they are computed with."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        fused = {name: tensor for name, tensor in tensors.items() if not pattern.fullmatch(name)}
        for stem in sorted({found[1] for found in map(pattern.fullmatch, tensors) if found}):
            count = len({name for name in tensors if name.startswith(stem) and "down_proj" in name})
            parts = {p: [tensors[f"{stem}.{e}.{p}_proj.weight"] for e in range(count)] for p in ("gate", "up", "down")}
            pairs = zip(parts["gate"], parts["up"], strict=True)
            fused[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            fused[f"{stem}.down_proj"] = torch.stack(parts["down"])
        return fused

    return rewrite(folder, change)


# -- the oracle ------------------------------------------------------------------------------------------------------


def oracle(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    auto = AutoModelForImageTextToText if kind == "qwen3_5_moe" else AutoModelForCausalLM
    # The grouped matrix product that experts use by default knows no float64.
    options = {} if kind == "olmo_hybrid" else {"experts_implementation": "eager"}
    return auto.from_pretrained(folder, dtype=dtype, **options)


@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    output: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return output[0].double()


@torch.no_grad()
def exact_logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """Full recompute by transformers in float64, with what it fixes at float32 widened: ``[N, V]``."""
    model = oracle(folder, torch.float64)
    for name, module in model.named_modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)) and "visual" not in name:
            assert module.rope_type == "default", "other frequencies stay as transformers computes them"
            dim = 2 * module.inv_freq.numel()
            theta = module.config.rope_parameters["rope_theta"]
            module.inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    with _no_float32(), _wide_softmax():
        return logits_of(model, ids)


@contextmanager
def _wide_softmax() -> Iterator[None]:
    sound: Any = F.softmax

    def softmax(x: Tensor, *args: Any, **options: Any) -> Tensor:
        result: Tensor = sound(x, *args, **{k: torch.float64 if v is torch.float32 else v for k, v in options.items()})
        return result

    with patch.object(F, "softmax", softmax):
        yield
