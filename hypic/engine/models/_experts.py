"""Where the matrices of single experts lie inside the fused parameters of ``hypic.engine.layers.moe.Experts``."""

from __future__ import annotations

import re

from torch import nn

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
