"""Full attention as several models' ``config.json`` describes it: grouped queries, or a latent (MLA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypic.engine.layers.attention import Attention, HeadShape
from hypic.engine.layers.mla import LatentAttention, LatentShape
from hypic.engine.layers.rotary import Rotary
from hypic.engine.models._config import head_dim, read, rope_from
from hypic.errors import CheckpointError, UnsupportedModel


def attention(config: Mapping[str, Any], **variant: Any) -> Attention:
    """Grouped-query attention of the usual sizes; ``variant`` replaces fields of ``HeadShape``."""
    heads = read(config, "num_attention_heads", int)
    sizes: dict[str, Any] = {
        "hidden_size": read(config, "hidden_size", int),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": head_dim(config),
        "bias": bool(config.get("attention_bias", False)),
    }
    return Attention(HeadShape(**(sizes | variant)))


def latent_attention(config: Mapping[str, Any], *, gated: bool = False) -> LatentAttention:
    """Attention over one latent and one rotary key a token."""
    rank = config.get("q_lora_rank")
    return LatentAttention(
        LatentShape(
            hidden_size=read(config, "hidden_size", int),
            num_heads=read(config, "num_attention_heads", int),
            latent_size=read(config, "kv_lora_rank", int),
            key_dim=read(config, "qk_nope_head_dim", int),
            rotary_dim=read(config, "qk_rope_head_dim", int),
            value_dim=read(config, "v_head_dim", int),
            query_rank=None if rank is None else int(rank),
            gated=gated,
            bias=bool(config.get("attention_bias", False)),
        )
    )


def latent_rotary(config: Mapping[str, Any]) -> Rotary:
    """Positions of the key that heads share, over all of it.

    Raises:
        UnsupportedModel: positions are scaled.
        CheckpointError: a number is missing.
    """
    rope = rope_from(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported with latent attention; only plain positions are.")
    if rope.get("rope_theta") is None:
        raise CheckpointError("config.json gives no rope_theta; fix the file.")
    return Rotary(read(config, "qk_rope_head_dim", int), float(rope["rope_theta"]))
