"""``hypic models``: which model types there are, what a checkpoint folder holds, and what a corpus will take of it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hypic.checkpoints import BUNDLED, bundled
from hypic.config import EngineConfig
from hypic.errors import UnsupportedModel
from hypic.store_spec import parse_bytes
from hypic.types import Policy
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.files import read_all
from hypic_apps.cli.parser import Parser, Subparsers, add_command

if TYPE_CHECKING:
    from hypic.checkpoints import CheckpointInfo

SUMMARY = "list model types, or inspect a checkpoint"
EXAMPLES = """
hypic models                          model types, supported and refused
hypic models path/to/checkpoint       layers, parameters, memory
hypic models path/to/checkpoint --corpus handbook.md notes/ --memory 8GiB
hypic models path/to/checkpoint --json
"""
DETAILS = """A checkpoint of any size is described from its configuration and the headers of
its files; no weight is read. With --corpus, texts are cut into passages and
counted by the checkpoint's tokenizer, to say what keeping all of them takes.
What a budget keeps is the pool's own arithmetic: whole pages and slots, less
what is set aside for --max-running requests, one of --max-context tokens. Where
two numbers stand, the first holds while the engine works and the second when
segments are all that is in memory; snapshots of conversations take from both."""
SEGMENT_TOKENS = 512
BUDGETS = ("1GiB", "4GiB", "16GiB", "64GiB", "256GiB")
LINE_CHARS = 80
T = {"head": "scalar T", "diagonal": "diagonal T", "dense": "dense T"}


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "models", "[FOLDER]", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("model", nargs="?", metavar="FOLDER", help="checkpoint folder, or hypic-tiny: the bundled one")
    parser.add_argument("--corpus", nargs="+", metavar="PATH", help="texts, or folders of them, to count")
    parser.add_argument("--memory", metavar="SIZE", help="a budget for cached segments, such as 8GiB")
    parser.add_argument(
        "--max-context", type=int, metavar="N", help="tokens of the longest request (default: the model's)"
    )
    parser.add_argument("--max-running", type=int, metavar="N", help="requests at a time (default: the engine's)")
    parser.add_argument("--dtype", default="auto", help="type that the weights are loaded in (default: auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Lists or inspects.

    Raises:
        UnsupportedModel: the checkpoint is refused; what is known of it has been printed.
    """
    from hypic_apps.cli import screen

    if args.model is None and (args.corpus or args.memory):
        raise InputError("--corpus and --memory are about a checkpoint; name its folder first.")
    limits = {name: getattr(args, name) for name in ("max_context", "max_running")}
    config = EngineConfig(dtype=args.dtype, **{name: value for name, value in limits.items() if value is not None})
    found = supported() if args.model is None else inspect(args.model, config, args.corpus, args.memory)
    if args.json:
        screen.result_object(found)
    elif args.model is None:
        _print_types(found)
    else:
        _print_model(found)
    if found.get("refusal"):
        raise UnsupportedModel(found["refusal"])
    return 0


def supported() -> dict[str, Any]:
    """Model types, the refused ones with their reasons, and the bundled model's folder if there is one."""
    from hypic.checkpoints import model_types, refused

    types = {kind.name: {k: v for k, v in asdict(kind).items() if k != "name"} for kind in model_types()}
    return {
        "model_types": types,
        "refused": dict(refused()),
        "bundled": str(bundled()) if bundled().is_dir() else None,
    }


def inspect(model: str, config: EngineConfig, corpus: Sequence[str] | None, memory: str | None) -> dict[str, Any]:
    """A checkpoint's description; ``segment_bytes`` is that of a segment of ``segment_tokens`` tokens.

    Raises:
        InputError: a text cannot be read.
        CheckpointError: a file of the checkpoint is missing or unreadable.
        ConfigError: the type or the budget cannot be right.
    """
    from hypic.checkpoints import describe

    budgets = [*([] if memory is None else [memory]), *BUDGETS]
    configs = {budget: replace(config, memory=parse_bytes(budget)) for budget in budgets}
    info = describe(model, config.dtype)
    size = None if info.refusal else info.segment_bytes(SEGMENT_TOKENS)
    found = {**asdict(info), "segment_tokens": SEGMENT_TOKENS, "segment_bytes": size}
    if corpus and not info.refusal:
        found["corpus"] = _count(model, info, corpus, configs)
    elif not info.refusal:
        found["fits"] = {budget: asdict(info.fit(SEGMENT_TOKENS, setting)) for budget, setting in configs.items()}
    return found


def _count(
    model: str, info: CheckpointInfo, paths: Sequence[str], configs: Mapping[str, EngineConfig]
) -> dict[str, Any]:
    """Passages of a corpus, as retrieval cuts them; those too short to pay are not cached but run live."""
    from hypic.checkpoints import token_counts
    from hypic_retriever import Splitter

    policy, files = Policy(), read_all(paths)
    passages = [passage.text for file in files for passage in Splitter().split(file.text, file.name)]
    counts = token_counts(model, list(dict.fromkeys(passages)))
    cached = [count for count in counts if policy.interiors(count)]
    return {
        "num_files": len(files),
        "num_passages": len(counts),
        "num_tokens": sum(counts),
        "num_segments": len(cached),
        "num_live": len(counts) - len(cached),
        "segment_bytes": sum(info.segment_bytes(count, policy) for count in cached),
        "memory_bytes": info.memory_for(cached, next(iter(configs.values()))),
        "fits": {budget: asdict(info.fit(cached, config)) for budget, config in configs.items()},
    }


def _print_types(found: dict[str, Any]) -> None:
    from hypic_apps.cli.screen import result

    for name, kind in found["model_types"].items():
        text = f"{kind['models']}: {kind['linear']}, {T[kind['transition']]}; logits tested against {kind['tested']}"
        result(_entry(name, text, found))
    result("\nrefused:")
    for name, reason in found["refused"].items():
        result(_entry(name, reason, found))
    result(f"\nbundled: {BUNDLED if found['bundled'] else 'none in this installation'}")


def _entry(name: str, text: str, found: dict[str, Any]) -> str:
    width = max(len(name) for name in (*found["model_types"], *found["refused"]))
    return textwrap.fill(f"{name:<{width}}  {text}", LINE_CHARS, subsequent_indent=" " * (width + 2))


def _print_model(found: dict[str, Any]) -> None:
    from hypic_apps.cli.screen import result

    rows = {
        "model type": found["model_type"],
        "layers": ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in found["layers"].items()),
        "parameters": f"{found['num_parameters']:,}",
        "weights": human_bytes(found["weight_bytes"]),
        "context": f"{found['max_context']:,} tokens" if found["max_context"] else "not stated",
    }
    rows |= {} if found["refusal"] else _kept(found)
    rows |= _corpus(found["corpus"]) if "corpus" in found else {}
    width = max(len(label) for label in rows)
    for label, value in rows.items():
        result(f"{label:<{width}}  {value}")


def _kept(found: dict[str, Any]) -> dict[str, str]:
    rows = {
        "loaded": f"{human_bytes(found['loaded_bytes'])} as {found['dtype']}",
        "linear layers": f"{found['linear']}, {T[found['transition']]}",
        "reuse": ", ".join(found["reuse"]),
        "a state": human_bytes(found["state_bytes"]),
        "a transition": human_bytes(found["transition_bytes"]),
        "K and V": f"{human_bytes(found['token_bytes'])} a token",
        f"a segment of {SEGMENT_TOKENS} tokens": human_bytes(found["segment_bytes"]),
    }
    left = ", ".join(f"{name}.* ({num_bytes / 1e9:.3f} GB)" for name, num_bytes in found["left_out"].items())
    rows |= {"left out": left} if left else {}
    return rows | ({"kept": _fits(found["fits"], "")} if "fits" in found else {})


def _corpus(found: dict[str, Any]) -> dict[str, str]:
    return {
        "corpus": f"{found['num_files']:,} files, {found['num_passages']:,} passages, {found['num_tokens']:,} tokens",
        "cached": f"{found['num_segments']:,} segments, {human_bytes(found['segment_bytes'])}; "
        f"{found['num_live']:,} shorter passages are run live",
        "to keep all": f"{human_bytes(found['memory_bytes'])} of memory",
        "kept": _fits(found["fits"], f" of {found['num_segments']:,}"),
    }


def _fits(found: Mapping[str, Mapping[str, Any]], suffix: str) -> str:
    return ", ".join(f"{_range(fit)}{'' if fit['refusal'] else suffix} in {budget}" for budget, fit in found.items())


def _range(fit: Mapping[str, Any]) -> str:
    if fit["refusal"]:
        return "no engine"
    least, most = fit["at_work"], fit["at_rest"]
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def human_bytes(count: int) -> str:
    """``123.4 MiB``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"
