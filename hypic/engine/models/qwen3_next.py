"""Qwen3-Next: Gated DeltaNet and gated attention, experts in most layers.

The checkpoint fuses the linear layers' projections per key head: ``in_proj_qkvz`` holds ``q | k | v | z`` of every key
head in turn, ``in_proj_ba`` holds ``b | a``. They are taken apart when they are loaded. ``mlp_only_layers`` and
``decoder_sparse_step`` say which layers are dense. Multi-token-prediction weights are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hypic.engine.layers.gated_delta_net import DeltaNetShape
from hypic.engine.models._config import read
from hypic.engine.models._qwen import QwenDecoder, assemble, delta_shape, dense_mlp, sparse_mlp
from hypic.engine.weights import Placement, Placements

LEFT_OUT = ("mtp.", "model.mtp.")


class Model(QwenDecoder):
    """See the module's docstring."""

    delta: DeltaNetShape

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        model = assemble(cls, config, _mlps(config))
        model.delta = delta_shape(config)
        return model

    def map_weights(self, name: str) -> Placements:
        if name.startswith(LEFT_OUT):
            return None
        fused = name.split(".")[-2] if name.endswith(".weight") else ""
        if fused not in FUSED:
            return self.place(name)
        stem = name.removeprefix("model.").replace(".linear_attn.", ".mixer.")
        parts = FUSED[fused](self.delta)
        return [Placement(stem.replace(fused, part), rows=rows) for part, rows in parts.items()]


def _mlps(config: Mapping[str, Any]) -> list[nn.Module]:
    dense, step = config.get("mlp_only_layers") or [], int(config.get("decoder_sparse_step") or 1)
    has_experts = bool(config.get("num_experts"))
    renormalise = bool(config.get("norm_topk_prob", True))
    return [
        sparse_mlp(config, renormalise=renormalise)
        if has_experts and layer not in dense and (layer + 1) % step == 0
        else dense_mlp(config)
        for layer in range(read(config, "num_hidden_layers", int))
    ]


def _split_per_head(num_heads: int, widths: Sequence[int]) -> list[list[int]]:
    """Rows of each part where every head holds one run of every part, one behind the other."""
    whole, starts = sum(widths), [sum(widths[:part]) for part in range(len(widths))]
    return [
        [head * whole + start + row for head in range(num_heads) for row in range(width)]
        for start, width in zip(starts, widths, strict=True)
    ]


def qkvz_rows(shape: DeltaNetShape) -> dict[str, list[int]]:
    """Rows of ``in_proj_qkvz`` that make ``in_proj_qkv`` (all of q, then k, then v) and ``in_proj_z``."""
    values = shape.value_size // shape.num_k_heads
    q, k, v, z = _split_per_head(shape.num_k_heads, (shape.head_k_dim, shape.head_k_dim, values, values))
    return {"in_proj_qkv": q + k + v, "in_proj_z": z}


def ba_rows(shape: DeltaNetShape) -> dict[str, list[int]]:
    """Rows of ``in_proj_ba`` that make ``in_proj_b`` and ``in_proj_a``."""
    repeats = shape.num_v_heads // shape.num_k_heads
    b, a = _split_per_head(shape.num_k_heads, (repeats, repeats))
    return {"in_proj_b": b, "in_proj_a": a}


FUSED = {"in_proj_qkvz": qkvz_rows, "in_proj_ba": ba_rows}
