"""All measurements of ``hypic bench``, and their parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypic_apps.bench import decode, encode, load, memory, parallel_command, potential, start, tiers, ttft_command
from hypic_apps.cli.parser import Parser

DETAILS = """Measures speed with the bundled model, or with the geometry of a real one and random
weights. Ratios come from one run on one machine; absolute times count on a GPU only."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement; returns the exit code.

    Raises:
        CommandError, HypicError: it cannot be done; one sentence says why.
        SystemExit: help was asked for.
    """
    args = build().parse_args(argv)
    run: Callable[..., int] = args.run
    return run(args)


def build() -> Parser:
    """Every measurement is a subcommand."""
    parser = Parser(prog="hypic bench", description=DETAILS, allow_abbrev=False)
    commands = parser.add_subparsers(title="measurements", metavar="WHAT", parser_class=Parser, required=True)
    for command in (ttft_command, encode, decode, memory, tiers, parallel_command, start, load, potential):
        command.add(commands)
    return parser
