"""A network of further families as the reference reads it from files, and features by head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.reference.checkpoint import Network, under
from tests.reference.mixers import Block, Config, SwiGLU, Weights

Mlp = Callable[[Tensor], Tensor]
EMBEDDINGS = ("model.embed_tokens.weight", "model.word_embeddings.weight")


def built(config: Config, weights: Weights, block: Callable[..., Block], types: list[str], offset: float) -> Network:
    blocks = tuple(block(config, under(weights, f"model.layers.{i}."), i, kind) for i, kind in enumerate(types))
    embedding = next(weights[n] for n in EMBEDDINGS if n in weights)
    head = weights.get("lm_head.weight", embedding)
    return Network(embedding, blocks, weights["model.norm.weight"] + offset, head, float(config["rms_norm_eps"]))


def dense(weights: Weights, stem: str) -> SwiGLU:
    return SwiGLU(*(weights[f"{stem}{part}_proj.weight"] for part in ("gate", "up", "down")))


def in_heads(x: Tensor, num_heads: int) -> Tensor:
    """``[N, H D]`` -> ``[N, H, D]``."""
    return x.reshape(len(x), num_heads, x.shape[1] // num_heads)
