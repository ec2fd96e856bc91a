"""Experts: the router of sigmoid scores as ``config.json`` describes it, and where single experts' matrices lie inside
the fused parameters of ``hypic.engine.layers.moe.Experts``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from hypic.engine.layers.routers import SigmoidRouter
from hypic.engine.models._config import read
from hypic.engine.weights import Placement

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def place_expert(name: str, model: nn.Module) -> Placement | None:
    """The place of one expert's ``gate``, ``up`` or ``down`` matrix, by our name; ``None`` for any other name."""
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    experts, number, part = found[1], int(found[2]), found[3]
    try:
        width = model.get_parameter(f"{experts}.down_proj").shape[-1]
    except AttributeError:  # a dense layer: loading then says that the name has no place
        return Placement(name)
    if part == "down":
        return Placement(f"{experts}.down_proj", (number,))
    half = slice(0, width) if part == "gate" else slice(width, 2 * width)
    return Placement(f"{experts}.gate_up_proj", (number, half))


def sigmoid_router(config: Mapping[str, Any], num_experts: int, *, has_bias: bool = True) -> SigmoidRouter:
    """DeepSeek-V3's router, as several models have it."""
    return SigmoidRouter(
        num_experts,
        read(config, "num_experts_per_tok", int),
        read(config, "hidden_size", int),
        num_groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        renormalise=bool(config.get("norm_topk_prob", True)),
        has_bias=has_bias,
    )
