"""What models with Mamba-2 layers share: sizes and limits as ``config.json`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypic.engine.layers.mamba2 import NO_LIMIT, Mamba2Shape
from hypic.engine.models._config import read
from hypic.errors import CheckpointError

OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def modern_types(given: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """One type per layer, by today's names.

    Raises:
        CheckpointError: there are not as many as layers.
    """
    count = config.get("num_hidden_layers", len(given))
    if len(given) != count:
        raise CheckpointError(f"config.json names {len(given)} layer types for {count} layers; fix the file.")
    return [OLDER_TYPES.get(kind, kind) for kind in given]


def mamba2_shape(config: Mapping[str, Any], inner_size: int | None = None, **variant: Any) -> Mamba2Shape:
    """Sizes from the ``mamba_*`` fields; ``inner_size`` replaces ``mamba_expand * hidden_size``.

    Raises:
        CheckpointError: a field is missing, or heads do not fill the layer.
    """
    size, num_heads = read(config, "hidden_size", int), read(config, "mamba_n_heads", int)
    inner = inner_size or read(config, "mamba_expand", int) * size
    head_dim = config.get("mamba_d_head", "auto")
    head_dim = inner // num_heads if head_dim in ("auto", None) else int(head_dim)
    if head_dim * num_heads != inner:
        raise CheckpointError(f"config.json has {num_heads} heads of {head_dim} for {inner} Mamba channels; fix it.")
    has_bias = bool(config.get("mamba_proj_bias", False))
    options: dict[str, Any] = {
        "eps": read(config, "rms_norm_eps", float),
        "biases": (has_bias, bool(config.get("mamba_conv_bias", True)), has_bias),
        "time_step_limit": time_step_limit(config),
    }
    return Mamba2Shape(
        hidden_size=size,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=read(config, "mamba_d_state", int),
        num_groups=read(config, "mamba_n_groups", int),
        conv_width=read(config, "mamba_d_conv", int),
        **options | variant,
    )


def time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """Between what a step is clamped. Some files write infinity as an object, since JSON has no word for it."""
    given = config.get("time_step_limit")
    if given is None:
        return NO_LIMIT
    low, high = (float(v["__float__"]) if isinstance(v, Mapping) else float(v) for v in given)
    return low, high
