"""``hypic eval``: what reuse costs, in answers, in states, and (``--algebra``) family by family."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic_apps.cli import findings, quality
from hypic_apps.cli.engine import add_model_options
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

if TYPE_CHECKING:
    from hypic_apps.eval.algebra import Row

SUMMARY = "measure what reuse costs: answers against full recompute"
EXAMPLES = """
hypic eval --items 40                   every set, every arm
hypic eval --set S1 --set S5 --arm transition --arm addition --full
hypic eval --data questions.jsonl.gz --passages 16
hypic eval --drift --plot drift.svg
hypic eval --sweep segments --arm transition --json
hypic eval --model Qwen/Qwen3.5-0.8B --set S9 --save results.json
hypic eval --algebra                    tiny random models, family by family
"""
DETAILS = """Every item is answered by full recompute and by each arm: the default policy,
other seams, the ablations, controls. Tables tell each arm's score with its 95 %
interval, and its gap to full recompute on the same items. The sets are made
from seeds; --check holds them against their hashes. --drift tells how far
states and hidden states are off, layer by layer. --algebra answers prompts of
several segments with tiny random models of every family, composed by
transition, addition and last, against full recompute."""


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "eval", "", SUMMARY, EXAMPLES, DETAILS)
    quality.add(parser)
    parser.add_argument("--algebra", action="store_true", help="what dropping the transition costs")
    parser.add_argument("--family", action="append", metavar="TYPE", help="only this model type; may be repeated")
    parser.add_argument("--prompts", type=positive, default=4, metavar="N",
                        help="prompts of --algebra and --drift to average (default: 4)")  # fmt: skip
    parser.add_argument("--save", metavar="FILE", help="write the result as JSON too, compressed if FILE ends in .xz")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser, policy=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    from hypic_apps.cli import screen

    found, lines = _algebra(args) if args.algebra else quality.run(args)
    if args.save:
        findings.save(Path(args.save), found)
    if args.json:
        screen.result_object(found)
    else:
        for line in lines:
            screen.result(line)
    return 1 if found.get("differing") else 0


def _algebra(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from hypic_apps.cli import screen
    from hypic_apps.eval import algebra
    from hypic_apps.eval.tiny import CONFIGS

    names = [name for name in CONFIGS if not args.family or name.partition(" ")[0] in args.family]
    unknown = [family for family in args.family or () if family not in {name.partition(" ")[0] for name in CONFIGS}]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no model type; hypic models lists them.")
    with screen.working(screen.notes(), "measuring"):
        rows = list(algebra.measure(names, args.prompts))
    return as_json(rows, args.prompts), table(rows)


def as_json(rows: Iterable[Row], num_prompts: int) -> dict[str, Any]:
    """Errors by family and way of composing, with what they were measured on."""
    import hypic
    from hypic_apps.cli.hardware import hardware
    from hypic_apps.eval import algebra

    return {
        "what": "relative error of composing cached segments against full recompute, tiny random models, float64",
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["hypic", *sys.argv[1:]]),
        "hypic": hypic.__version__,
        **hardware(),
        "num_prompts": num_prompts,
        "segment_tokens": list(algebra.SEGMENT_TOKENS),
        "families": {
            row.name: {"T": row.transition, "errors": {how: asdict(error) for how, error in row.errors.items()}}
            for row in rows
        },
    }


def table(rows: Iterable[Row]) -> list[str]:
    """What dropping T costs, as Markdown: for each way, the error of the first and last state and of the logits."""
    from hypic_apps.eval.algebra import COMPOSES

    heads = [f"{how}: {part}" for how in COMPOSES for part in ("first state", "last state", "logits")]
    lines = [f"| family | T | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 2)]
    for row in rows:
        values = [shown(value) for how in COMPOSES for value in asdict(row.errors[how]).values()]
        lines.append(f"| `{row.name}` | {row.transition} | {' | '.join(values)} |")
    return lines


def shown(error: float) -> str:
    """A share in per cent, or a power of ten where it is rounding."""
    if error == 0:
        return "0"
    return f"{error:.0e}" if error < 1e-6 else f"{100 * error:.2g} %" if error < 1 else f"{100 * error:.0f} %"
