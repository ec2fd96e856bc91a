"""Reading ``config.json`` with errors that say what is missing or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hypic.engine.layers.rotary import Rotary
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


def rotary_from(config: Mapping[str, Any], head_dim: int, default_factor: float) -> Rotary:
    """Rotary positions from ``rope_parameters`` (or the older top-level fields).

    Raises:
        UnsupportedModel: frequencies are scaled in a way we do not compute.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise UnsupportedModel(f"rope_type {kind!r} is not supported yet; only plain rotary positions are.")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise CheckpointError("config.json gives no rope_theta; fix the file.")
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", default_factor))
    dim = config.get("rotary_dim") or int(head_dim * factor)
    return Rotary(int(dim), float(theta))
