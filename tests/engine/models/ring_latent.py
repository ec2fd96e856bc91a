"""Tiny checkpoints of Ring/Ling 2.5, written from the names of its published code, and its attention as a reference.

transformers has no such model. Its linear layers are those of Ring-linear 2.0; its full attention is written out here
with keys and values of every head, where the engine keeps latents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import draw
from tests.checkpoints_gdn import RING, LayerType, _ring_mlp, _ring_name, _ring_types, _single
from tests.reference.algebra import inverse_frequencies
from tests.reference.mixers import Attention, Config, Weights, rms

LATENT: dict[str, Any] = RING | {
    "model_type": "bailing_hybrid",
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_interleave": True,
}
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write(folder: Path, single: LayerType | None = None, **overrides: Any) -> Path:
    """A checkpoint; ``single`` gives one layer of that kind."""
    config = LATENT | _single(single) | overrides
    folder.mkdir(parents=True, exist_ok=True)
    shapes = dict(_shapes(config))
    tensors = {name: draw(_drawn_as(name), torch.Size(shape), 0, zero_centred=False) for name, shape in shapes.items()}
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _drawn_as(name: str) -> str:
    return _ring_name(name).replace("a_layernorm", "a_norm")


def _shapes(c: dict[str, Any]) -> Shapes:
    size = c["hidden_size"]
    yield "model.word_embeddings.weight", (c["vocab_size"], size)
    yield "lm_head.weight", (c["vocab_size"], size)
    yield "model.norm.weight", (size,)
    for i, kind in enumerate(_ring_types(c)):
        stem = f"model.layers.{i}."
        yield stem + "input_layernorm.weight", (size,)
        yield stem + "post_attention_layernorm.weight", (size,)
        yield from (_linear if kind == "linear_attention" else _latent)(c, stem + "attention.")
        yield from _ring_mlp(c, stem + "mlp.", i < c["first_k_dense_replace"])


def _linear(c: dict[str, Any], stem: str) -> Shapes:
    width = c["num_attention_heads"] * c["head_dim"]
    yield stem + "query_key_value.weight", (3 * width, c["hidden_size"])
    yield stem + "dense.weight", (c["hidden_size"], width)
    yield stem + "query_layernorm.weight", (c["head_dim"],)
    yield stem + "key_layernorm.weight", (c["head_dim"],)
    yield stem + "g_proj.weight", (width, c["hidden_size"])
    yield stem + "g_norm.weight", (width,)


def _latent(c: dict[str, Any], stem: str) -> Shapes:
    size, heads, latent, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["q_lora_rank"]
    queries = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    if rank is None:
        yield stem + "q_proj.weight", (queries, size)
    else:
        yield stem + "q_a_proj.weight", (rank, size)
        yield stem + "q_a_layernorm.weight", (rank,)
        yield stem + "q_b_proj.weight", (queries, rank)
    yield stem + "kv_a_proj_with_mqa.weight", (latent + c["qk_rope_head_dim"], size)
    yield stem + "kv_a_layernorm.weight", (latent,)
    yield stem + "kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
    yield stem + "dense.weight", (size, heads * c["v_head_dim"])


class LatentAttention(Attention):
    """Keys ``[rotary part, shared | plain part]``: the rotary part first, neighbours of a pair moved half apart."""

    def __init__(self, config: Config, w: Weights) -> None:
        self.w, self.config, self.gated = w, config, False
        self.num_heads = self.num_kv_heads = config["num_attention_heads"]
        self.head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        self.frequencies = inverse_frequencies(config["rope_theta"], config["qk_rope_head_dim"])

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        c, count = self.config, len(x)
        plain, rotary, latent = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        q = self._queries(x).reshape(count, self.num_heads, plain + rotary)
        both = x @ self.w["kv_a_proj_with_mqa.weight"].T
        normed = rms(both[:, :latent], 1e-6) * self.w["kv_a_layernorm.weight"]
        heads = (normed @ self.w["kv_b_proj.weight"].T).reshape(count, self.num_heads, plain + c["v_head_dim"])
        shared = both[:, None, latent:].expand(count, self.num_heads, rotary)
        keys = torch.cat([pairs_apart(shared), heads[..., :plain]], dim=-1)
        # As wide as keys, as the reference's attention has it.
        values = torch.nn.functional.pad(heads[..., plain:], (0, self.head_dim - c["v_head_dim"]))
        return torch.cat([pairs_apart(q[..., plain:]), q[..., :plain]], dim=-1), keys, values, None

    def _queries(self, x: Tensor) -> Tensor:
        if "q_proj.weight" in self.w:
            return x @ self.w["q_proj.weight"].T
        low = rms(x @ self.w["q_a_proj.weight"].T, 1e-6) * self.w["q_a_layernorm.weight"]
        return low @ self.w["q_b_proj.weight"].T

    def output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        return o[..., : self.config["v_head_dim"]].flatten(1) @ self.w["dense.weight"].T


def pairs_apart(x: Tensor) -> Tensor:
    """Channels ``0, 2, 4, ...`` and then ``1, 3, 5, ...``."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
