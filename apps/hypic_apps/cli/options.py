"""Flags made from the fields of ``EngineConfig`` and ``Policy``: every setting has one, and none is written twice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import Field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypic.config import DTYPES, LAUNCHERS, LOAD_FORMATS, STORAGES, EngineConfig
from hypic.types import Policy

_PREFIX = "engine."
HELP: Mapping[str, str] = {
    "device": "auto, cpu or cuda",
    "dtype": f"type of the weights: {', '.join(DTYPES)}",
    "memory": "size of the one pool: bytes, a size such as 8GiB, or a share of what is free such as 0.5",
    "max_context": "most tokens of a prompt and its answer",
    "max_running": "most requests at a time",
    "max_step_tokens": "most tokens of one step; by default 8192, and 16384 on a large GPU",
    "typical_segment_tokens": "length of a typical segment, by which memory is split between K/V and states",
    "page_size": "tokens of a page of keys and values",
    "store": "where entries are kept, e.g. device://8GiB,host://32GiB,disk:///path?size=200GiB",
    "storage": "cached states: " + " or ".join(STORAGES),
    "drop_below": "leave out transitions of heads whose norm is below this, e.g. 1e-3",
    "ttl": "seconds after which what is cached is forgotten, e.g. 3600 or alice=3600,*=86400",
    "seed": "seed of dummy weights",
    "load_format": " or ".join(LOAD_FORMATS),
    "primer": "text behind which segments are encoded; by default the checkpoint's own; '' is none",
    "adapter": "folder or repository of one PEFT LoRA adapter, merged into the weights",
    "workers": "processes with a replica of the model each",
    "launcher": f"who starts the workers: {' or '.join(LAUNCHERS)}",
    "threads": "threads of torch on a CPU",
    "kernels": "auto (on a GPU with Triton), on or off; on a CPU their slow references are run",
    "graphs": "record small steps on a GPU before the engine is ready",
    "reuse": "what may be reused: cached segments, exact prompt heads, or nothing",
    "seam": "tokens at a segment's head that are run in context",
    "min_segment_tokens": "shorter segments are run live; by default four seams",
    "compose": "how a segment's state is carried on; all but transition are ablations",
    "rotate": "move cached keys to their positions; without is an ablation",
    "tail_seam": "tokens at a segment's end that are run in context too",
    "seam_share": "least share of a segment that its head seam takes",
    "seam_every": "a further seam every so many tokens of a segment; encoding grows with their number; 0: none",
    "live_last": "how many of the prompt's last segments are run live",
    "primed": "encode segments behind the primer, if there is one",
    "rungs": "encode each behind the rung of the primer that fits its place in the prompt, once for each rung",
    "seam_opening": "seams follow first short lines and sentences up to so many tokens; by default the checkpoint's",
    "deterministic": "results that do not depend on the batch",
}


def add_engine_options(parser: argparse.ArgumentParser, *, policy: bool = True) -> None:
    """Adds a flag per field; what is left out of the command line is left to the defaults."""
    for title, kind in (("engine", EngineConfig), ("policy", Policy))[: 1 + policy]:
        group = parser.add_argument_group(title)
        hints = get_type_hints(kind)
        for setting in fields(kind):
            if setting.name != "policy":
                _add(group, setting, hints[setting.name])


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, as keywords of ``hypic.LLM``."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}


def size_or_share(text: str) -> int | float | str:
    """``0.5`` is a share, ``8589934592`` bytes; anything else is left for ``EngineConfig`` to read."""
    if text.strip().isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _add(group: argparse._ArgumentGroup, setting: Field[Any], hint: Any) -> None:
    default = "" if setting.default is None else f" (default: {str(setting.default).lower()})"
    group.add_argument(
        f"--{setting.name.replace('_', '-')}",
        dest=_PREFIX + setting.name,
        default=argparse.SUPPRESS,
        help=HELP.get(setting.name, f"see hypic.{setting.name}") + default,
        **_reading(setting.name, hint),
    )


def _reading(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads a value of the annotated type, and what help calls it."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    kinds = {kind for kind in get_args(hint) if kind is not type(None)} if isinstance(hint, UnionType) else {hint}
    if kinds == {int}:
        return {"type": int, "metavar": "N"}
    if kinds == {float}:
        return {"type": float, "metavar": "SHARE"}
    unit = "SECONDS" if name == "ttl" else "SIZE"
    return {"type": size_or_share, "metavar": unit} if len(kinds) > 1 else {"metavar": "VALUE"}
