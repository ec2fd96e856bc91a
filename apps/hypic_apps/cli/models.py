"""``hypic models``: which model types there are, and what a checkpoint folder holds."""

from __future__ import annotations

import argparse
import ast
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypic
from hypic.checkpoints import BUNDLED, bundled
from hypic_apps.cli.checkpoint import describe
from hypic_apps.cli.parser import Parser, Subparsers, add_command

SUMMARY = "list model types, or inspect a checkpoint"
EXAMPLES = """
hypic models                          model types that can be loaded
hypic models path/to/checkpoint       layers, parameters, memory
hypic models path/to/checkpoint --json
"""
DETAILS = """A checkpoint is described from its files. One of less than 2 GB of weights is
also loaded, which shows that it works and what a cached segment of 512 tokens
takes; --load does that for larger ones too."""
LOADED_BYTES = 2_000_000_000
SEGMENT_TOKENS = 512
DUMMY_CONTEXT = 1024
LINE_CHARS = 80


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "models", "[FOLDER]", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("model", nargs="?", metavar="FOLDER", help="checkpoint folder")
    parser.add_argument("--load", action="store_true", help="load the model however large it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Lists or inspects."""
    from hypic_apps.cli import screen

    found = supported() if args.model is None else inspect(Path(args.model).expanduser(), args.load)
    if args.json:
        screen.result_object(found)
    elif args.model is None:
        _print_types(found)
    else:
        _print_model(found)
    return 0


def supported() -> dict[str, Any]:
    """Model types with what their files say first, and the bundled model's folder if there is one."""
    files = sorted((Path(hypic.__file__).parent / "engine" / "models").glob("[!_]*.py"))
    types = {path.stem: _first_line(path) for path in files}
    return {"model_types": types, "bundled": str(bundled()) if bundled().is_dir() else None}


def inspect(folder: Path, load: bool) -> dict[str, Any]:
    """A checkpoint's description; ``segment_bytes`` is ``None`` where it was not loaded.

    Raises:
        InputError: a file is missing or unreadable.
        UnsupportedModel, CheckpointError: loading it fails.
    """
    description = describe(folder)
    wanted = load or description.weight_bytes < LOADED_BYTES
    measured = _segment_bytes(folder) if wanted else None
    return {**asdict(description), "segment_tokens": SEGMENT_TOKENS, "segment_bytes": measured}


def _segment_bytes(folder: Path) -> int:
    """What the engine reports for a segment of 512 tokens."""
    from hypic_apps.cli.screen import notes, working

    with working(notes(), f"loading {folder.name}"):
        from hypic import LLM, Segment

        with LLM(str(folder), max_running=1, max_context=DUMMY_CONTEXT) as llm:
            text = _text_of(llm, SEGMENT_TOKENS)
            (report,) = llm.warm([Segment(text)])
    (segment,) = report.segments
    return segment.num_bytes


def _text_of(llm: hypic.LLM, num_tokens: int) -> str:
    """A text of that many tokens: words are added until it has them."""
    words = ["river"]
    while llm.count_tokens(" ".join(words)) < num_tokens:
        words += ["and", "river"]
    return " ".join(words)


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def _print_types(found: dict[str, Any]) -> None:
    from hypic_apps.cli.screen import result

    width = max(len(name) for name in found["model_types"])
    for name, summary in found["model_types"].items():
        indent = " " * (width + 2)
        result(textwrap.fill(f"{name:<{width}}  {summary}", LINE_CHARS, subsequent_indent=indent))
    result(f"\nbundled: {BUNDLED if found['bundled'] else 'none in this installation'}")


def _print_model(found: dict[str, Any]) -> None:
    from hypic_apps.cli.screen import result

    layers = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in found["layers"].items())
    size = found["segment_bytes"]
    rows = {
        "model type": found["model_type"],
        "layers": layers or "not stated",
        "parameters": f"{found['num_parameters']:,}",
        "weights": human_bytes(found["weight_bytes"]),
        "context": f"{found['max_context']:,} tokens" if found["max_context"] else "not stated",
        f"a segment of {SEGMENT_TOKENS} tokens": "not measured; add --load" if size is None else human_bytes(size),
    }
    width = max(len(label) for label in rows)
    for label, value in rows.items():
        result(f"{label:<{width}}  {value}")


def human_bytes(count: int) -> str:
    """``123.4 MiB``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"
