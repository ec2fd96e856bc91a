"""Reading ``config.json`` with errors that say what is missing or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hypic.engine.layers.rotary import Rotary, Yarn
from hypic.errors import CheckpointError, UnsupportedModel

T = TypeVar("T")


def read(config: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A required field.

    Raises:
        CheckpointError: it is missing or of another type.
    """
    value = config.get(name)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"config.json has {name} = {value!r} where a {kind.__name__} is needed; fix the file.")
    return value


def refuse_unless(config: Mapping[str, Any], name: str, value: object) -> None:
    """Refuse a feature by name.

    Raises:
        UnsupportedModel: the field is present with another value.
    """
    found = config.get(name, value)
    if found != value:
        raise UnsupportedModel(f"config.json has {name} = {found!r}; only {value!r} is supported.")


def refuse_all_but(config: Mapping[str, Any], values: Mapping[str, object]) -> None:
    """Refuse every feature of which the field is present with another value than the one given here.

    Raises:
        UnsupportedModel: the first of them.
    """
    for name, value in values.items():
        refuse_unless(config, name, value)


def head_dim(config: Mapping[str, Any]) -> int:
    """``head_dim``, or a head's share of the hidden size."""
    return int(config.get("head_dim") or read(config, "hidden_size", int) // read(config, "num_attention_heads", int))


def layer_numbers(types: Sequence[str], known: Sequence[str]) -> list[int]:
    """Each layer's number among the layers of its own type.

    Raises:
        UnsupportedModel: a type that is not known.
    """
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise UnsupportedModel(
            f"layer type {unknown[0]!r} is not supported in this model; supported are {', '.join(known)}."
        )
    return [list(types[:depth]).count(kind) for depth, kind in enumerate(types)]


def refuse_quantised(config: Mapping[str, Any]) -> None:
    """Refuse weights of fewer than 16 bits, whose layout depends on the tool that made them.

    Raises:
        UnsupportedModel: the checkpoint is quantised; the sentence names the scheme, and what to load instead.
    """
    found = config.get("quantization_config") or config.get("quantization")
    if not found:
        return
    scheme = str(found.get("quant_method") or found.get("mode") or "of a kind its config.json does not name")
    bits = found.get("bits") or found.get("w_bit")
    raise UnsupportedModel(
        f"this checkpoint is quantised ({scheme}{f', {bits} bits' if bits else ''}), which is not supported; load "
        f"{_unquantised(str(config.get('_name_or_path') or ''))}."
    )


QUANTISED = re.compile(
    r"[-_.](?:fp8|nvfp4|mxfp4|awq|gptq|bnb|int[48]|[48]bit|w[48]a(?:8|16)|gguf|quantized)\b.*", re.IGNORECASE
)


def _unquantised(name: str) -> str:
    """The checkpoint that one of this name was made from, as far as the name tells."""
    stem = QUANTISED.sub("", name)
    if stem and stem != name:
        return f"{stem!r}, the checkpoint it was made from"
    return "the bf16 checkpoint it was made from, whose name usually lacks the suffix -FP8, -AWQ, -GPTQ or -4bit"


def rope_from(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters``, or what older files spread over ``rope_scaling`` and the top level."""
    older = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    return older | dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def rotary_from(config: Mapping[str, Any], head_dim: int, default_factor: float) -> Rotary:
    """Rotary positions from ``rope_parameters`` (or the older top-level fields).

    Raises:
        UnsupportedModel: frequencies are scaled in a way we do not compute.
        CheckpointError: a number is missing.
    """
    rope = rope_from(config)
    yarn = _scaling(rope, config)
    theta = rope.get("rope_theta")
    if theta is None:
        raise CheckpointError("config.json gives no rope_theta; fix the file.")
    factor = rope.get("partial_rotary_factor", default_factor)
    dim = config.get("rotary_dim") or int(head_dim * factor)
    return Rotary(int(dim), float(theta), yarn)


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):
        return None
    if kind != "yarn":
        by_length = kind in ("dynamic", "longrope", "su")
        reason = "its angles change with a prompt's length, so nothing can be kept" if by_length else "only yarn is"
        raise UnsupportedModel(f"rope_type {kind!r} is not supported ({reason}); load a checkpoint without it.")
    original = rope.get("original_max_position_embeddings") or read(config, "max_position_embeddings", int)
    factor = rope.get("factor") or read(config, "max_position_embeddings", int) / original
    numbers = {name: float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name)}
    scales: dict[str, Any] = {name: rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    return Yarn(float(factor), int(original), truncate=bool(rope.get("truncate", True)), **numbers, **scales)


def context_from(config: Mapping[str, Any]) -> int:
    """Tokens a model takes; YaRN's factor counts where the file still names the length before it."""
    longest = read(config, "max_position_embeddings", int)
    yarn = _scaling(rope_from(config), config)
    return longest if yarn is None else max(longest, int(yarn.factor * yarn.original_context))


def types_from(config: Mapping[str, Any], interval: int) -> list[str]:
    """``layer_types``; where the file has none, every ``interval``-th layer attends.

    Raises:
        CheckpointError: there are not as many as layers.
    """
    count = read(config, "num_hidden_layers", int)
    given = list(config.get("layer_types") or ())
    if given and len(given) != count:
        raise CheckpointError(f"config.json names {len(given)} layer_types for {count} layers; fix the file.")
    return given or ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
