"""``hypic bench``: its measurements stand in ``hypic_apps.bench``, which is imported when the command is named."""

from __future__ import annotations

import argparse

from hypic_apps.cli.parser import Parser, Subparsers, add_command

SUMMARY = "measure speed against floors and peers"
EXAMPLES = """
hypic bench ttft
hypic bench ttft --geometry qwen3.5-4b --segments 4,16 --json
hypic bench ttft --help
"""
DETAILS = """WHAT is ttft, encode, decode, memory, tiers, start, load, potential or
parallel; each has a --help of its own. Speed is measured with the bundled
model, or with the geometry of a real one and random weights. Ratios come from
one run on one machine."""


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command; what stands behind it is read by the measurements' own parser."""
    parser = add_command(commands, "bench", "WHAT", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="WHAT", help="the measurement and its options")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hands over to the measurements' own parser."""
    from hypic_apps.bench import command

    return command.main(args.rest)
