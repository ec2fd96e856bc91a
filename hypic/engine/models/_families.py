"""Which model types there are: what their linear layers are, what logits were compared with, and which are refused.

Tables only; what a model computes stands in its own file. ``T`` of a cached segment is one number a head (*head*), one
a key channel (*diagonal*) or a matrix (*dense*).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A supported model type: released models, linear layers, kind of ``T``, and what its logits are tested against."""

    models: str
    linear: str
    transition: str
    tested: str = "transformers"


FAMILIES: Mapping[str, Family] = {
    "bailing_hybrid": Family("Ling 3", "KDA, bounded gate", "dense"),
    "bailing_moe_linear": Family(
        "Ring/Ling-linear 2.0, Ring/Ling 2.5", "Lightning, rotary keys", "head", "own float64 reference"
    ),
    "bamba": Family("Bamba", "Mamba-2", "head"),
    "falcon_h1": Family("Falcon-H1", "Mamba-2 beside attention", "head"),
    "granitemoehybrid": Family("Granite 4 H", "Mamba-2", "head"),
    "kimi_linear": Family("Kimi-Linear", "KDA", "dense"),
    "lfm2": Family("LFM2", "gated short convolutions, no state", "head"),
    "minimax": Family(
        "MiniMax-Text-01, M1", "Lightning", "head", "transformers; partial rotary: own float64 reference"
    ),
    "nemotron_h": Family("Nemotron-H", "Mamba-2", "head"),
    "olmo_hybrid": Family("OLMo-Hybrid", "Gated DeltaNet, beta to 2", "dense"),
    "qwen3_5_moe_text": Family("Qwen3.5 with experts", "Gated DeltaNet", "dense"),
    "qwen3_5_text": Family("Qwen3.5", "Gated DeltaNet", "dense"),
    "qwen3_next": Family("Qwen3-Next", "Gated DeltaNet", "dense"),
    "zamba2": Family("Zamba2", "Mamba-2", "head"),
}
ALIASES: Mapping[str, str] = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "falcon_mamba_text": "falcon_mamba",
    "glm5_next_text": "glm5_next",
    "inkling_text": "inkling",
    "inkling2": "inkling",
    "inkling2_text": "inkling",
    "inkling2_loop": "inkling",
    "qwen4_exp_text": "qwen4_exp",
}
# Architectures whose files share a ``model_type`` with another model.
BY_ARCHITECTURE: Mapping[str, str] = {"BailingMoeV2_5ForCausalLM": "bailing_moe_linear"}

_MAMBA_1 = "its Mamba-1 layers decay every number of a state by itself, an element-wise T that no family here computes"
_SLIDING = "its sliding-window attention has no cache here"
_SPARSE = "its attention picks keys by a sparse indexer, whose own keys have no cache here"
REFUSED: Mapping[str, str] = {
    "falcon_mamba": _MAMBA_1,
    "glm5_next": f"{_SPARSE}, and its residual streams are hyper-connections",
    "inkling": "its keys, values and outputs pass through short convolutions, whose tails have no cache here",
    "jamba": _MAMBA_1,
    "lara_mini": _SLIDING,
    "lfm2_moe": "its experts are not built here",
    "lfm3": _SLIDING,
    "mamba": _MAMBA_1,
    "mamba2": "it has no attention layers, and no file here builds such a model",
    "qwen4_exp": f"{_SPARSE}, and it reads embeddings of token n-grams, which reach across a segment's border",
    "recurrent_gemma": f"its RG-LRU layers decay every channel by itself, and {_SLIDING}",
    "rwkv": "its state is a quotient with a running maximum per channel, which no family here computes",
    "zamba": _MAMBA_1,
    "zaya": "its keys and values are mixed with those of the tokens before, whose tails have no cache here",
}
