"""Tiny random checkpoints, built and read by transformers' own classes: what loaders load and tests compare with.

Weights are drawn per tensor from its name and the seed, so a plain checkpoint and its multimodal wrapper
hold the same numbers. They are scaled so that every layer matters, logits are of order one, and states
decay slowly: with fast decay, errors in a state would hide.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LayerType = Literal["linear_attention", "full_attention"]

QWEN: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "bos_token_id": None,
    "eos_token_id": None,
}

MINIMAX: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "block_size": 32,  # transformers stores decay tables of this size squared
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    # Six different numbers, so that no two can be mistaken for each other.
    "full_attn_alpha_factor": 1.2,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 1.1,
    "linear_attn_beta_factor": 0.8,
    "mlp_alpha_factor": 1.3,
    "mlp_beta_factor": 0.7,
    "bos_token_id": None,
    "eos_token_id": None,
}

VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "num_position_embeddings": 16}


def qwen(
    folder: str | Path,
    *,
    wrapper: bool = False,
    single: LayerType | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """A ``qwen3_5_text`` checkpoint, or the multimodal ``qwen3_5`` that wraps the same text model.

    ``single`` gives a model with one layer of that type; ``overrides`` are fields of the configuration,
    e.g. ``tie_word_embeddings=True``.
    """
    from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    settings = QWEN | _single(single) | overrides
    if wrapper:
        vision = VISION | {"out_hidden_size": settings["hidden_size"]}
        tied = bool(settings.get("tie_word_embeddings", False))
        config = Qwen3_5Config(text_config=settings, vision_config=vision, tie_word_embeddings=tied)
        model = _fresh(Qwen3_5ForConditionalGeneration, config)
    else:
        model = _fresh(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**settings))
    return _save(model, Path(folder), dtype, seed, num_shards)


def minimax(
    folder: str | Path,
    *,
    rotary_dim: int | None = None,
    single: LayerType | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """A ``minimax`` checkpoint. With ``rotary_dim`` below the head size transformers is no oracle: it ignores it."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    settings = MINIMAX | _single(single) | overrides
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        period = MINIMAX["layer_types"] * overrides["num_hidden_layers"]
        settings["layer_types"] = period[: overrides["num_hidden_layers"]]
    settings["rotary_dim"] = settings["head_dim"] if rotary_dim is None else rotary_dim
    return _save(_fresh(MiniMaxForCausalLM, MiniMaxConfig(**settings)), Path(folder), dtype, seed, num_shards)


def oracle(folder: str | Path, dtype: torch.dtype = torch.float64) -> Any:
    """The checkpoint as transformers loads it. Inside, norms, angles and the delta rule run in float32 all the same."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    auto = AutoModelForImageTextToText if kind == "qwen3_5" else AutoModelForCausalLM
    # The grouped matrix product that experts use by default knows no float64.
    options = {"experts_implementation": "eager"} if kind == "minimax" else {}
    return auto.from_pretrained(folder, dtype=dtype, **options)  # in evaluation mode already


@torch.no_grad()
def oracle_logits(folder: str | Path, ids: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Full recompute by transformers: logits ``[N, V]`` in float64."""
    output: Tensor = oracle(folder, dtype)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return output[0].to(torch.float64)


@torch.no_grad()
def exact_oracle_logits(folder: str | Path, ids: Sequence[int]) -> Tensor:
    """Full recompute by transformers with all that it fixes at float32 widened to float64: ``[N, V]``.

    Its code is left as it is; only the constants it made and its casts to float32 are replaced. So its
    formulas can be compared to rounding, where the model as it is gives 1e-5.
    """
    model = oracle(folder)
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if "inv_freq" in buffers and "visual" not in name:
            dim = 2 * module.inv_freq.numel()
            theta = module.config.rope_parameters["rope_theta"]
            module.inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if "slope_rate" in buffers:
            _widen_decay(module)
    with _no_float32():
        output: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return output[0]


def _widen_decay(module: Any) -> None:
    heads = torch.arange(1, module.num_attention_heads + 1, dtype=torch.float64)
    factor = 1 - module.layer_idx / (module.num_hidden_layers - 1 + 1e-5) + 1e-5
    module.slope_rate = (factor * 2 ** (-8 * heads / module.num_attention_heads))[:, None, None]
    module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)


@contextmanager
def _no_float32() -> Iterator[None]:
    """Casts to float32 give float64."""
    cast: Any = Tensor.to

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in options.items()}
        result: Tensor = cast(self, *widened, **named)
        return result

    with patch.object(Tensor, "to", to), patch.object(Tensor, "float", lambda self: self.double()):
        yield


def random_ids(num_tokens: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    """Token ids to fill a segment with."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    return ids


def add_tokenizer(folder: str | Path, vocab_size: int = 320) -> None:
    """Writes a byte-level tokenizer with a ChatML template that fits a vocabulary of ``vocab_size``.

    The 256 bytes come first, then merges of two letters, at the end ``<|endoftext|>``, ``<|im_start|>`` and
    ``<|im_end|>``. ``config.json`` and ``generation_config.json`` are told of the end token.

    Raises:
        ValueError: fewer than 259 tokens, the bytes and three special ones, fit no vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if vocab_size < 256 + len(specials):
        raise ValueError(f"vocab_size is {vocab_size}; a byte-level tokenizer with ChatML needs 259.")
    letters = ["Ġ", *"etaoinsrhldcumfpgwybv"]
    merges = [(a, b) for a in letters for b in letters[1:]][: vocab_size - 256 - len(specials)]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    vocab = {token: idx for idx, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    _edit(Path(folder) / "tokenizer_config.json", _tokenizer_config(specials))
    for name in ("config.json", "generation_config.json"):
        _edit(Path(folder) / name, {"eos_token_id": tokenizer.token_to_id("<|im_end|>")})


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer_config(specials: list[str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": specials,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }


def _edit(file: Path, changes: dict[str, Any]) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    content.update(changes)
    if "text_config" in content and "eos_token_id" in changes:
        content["text_config"]["eos_token_id"] = changes["eos_token_id"]
    file.write_text(json.dumps(content, indent=2))


def _single(layer_type: LayerType | None) -> dict[str, Any]:
    return {} if layer_type is None else {"num_hidden_layers": 1, "layer_types": [layer_type]}


def _fresh(model_class: Any, config: Any) -> Any:
    # The class draws weights of its own, all replaced later: leave the caller's random numbers alone.
    with torch.random.fork_rng():
        return model_class(config)


def _save(model: Any, folder: Path, dtype: torch.dtype, seed: int, num_shards: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, parameter in model.named_parameters():
        name = name.replace("model.language_model.", "model.")
        # MiniMax's decay tables are buffers and keep their precision: only parameters change type.
        parameter.data = draw(name, parameter.shape, seed, zero_centred=model.config.model_type != "minimax").to(dtype)
    model.tie_weights()
    model.config.dtype = dtype
    model.save_pretrained(folder)
    if num_shards > 1:
        _split(folder, num_shards)
    return folder


def draw(name: str, shape: torch.Size, seed: int, zero_centred: bool) -> Tensor:
    """A tensor's random values, float64, by its name in the text model. Zero-centred norms scale by ``1 + w``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("A_log"):
        return torch.log(0.005 + 0.045 * torch.rand(shape, generator=generator, dtype=torch.float64))
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.5 + 0.2 * normal  # sharper attention, so that a wrong key is seen
    if name.endswith("dt_bias") or "conv1d" in name:
        return 0.5 * normal
    if name.endswith("norm.weight"):
        gated = "linear_attn.norm" in name
        return 0.2 * normal + (0.0 if zero_centred and not gated else 1.0)
    return normal * shape[-1] ** -0.5 if len(shape) > 1 else 0.2 * normal


def _split(folder: Path, num_shards: int) -> None:
    """One file of weights becomes ``num_shards``, with the index that names them."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    file_of = {name: f"model-{i % num_shards + 1:05d}-of-{num_shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(file_of.values())):
        part = {name: tensors[name] for name in names if file_of[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    single.unlink()
