"""An argument parser whose errors are one sentence, and whose help ends with examples."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hypic_apps.cli.errors import InputError


class Parser(argparse.ArgumentParser):
    """Raises ``InputError`` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.rstrip('.')}; see {self.prog} --help.")


Subparsers = argparse._SubParsersAction  # argparse gives it no public name


def add_command(
    commands: Subparsers[Parser], name: str, arguments: str, summary: str, examples: str, details: str
) -> Parser:
    """A subcommand with its help: arguments, summary, details, and example calls, one a line."""
    return commands.add_parser(
        name,
        usage=" ".join(["%(prog)s [options]", *arguments.split()]),
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return value


def count(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, such as 0.5")
    return found
