"""Flags that measurements share, and how their values are read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hypic_apps.bench.geometries import Geometry, known
from hypic_apps.bench.records import as_json, save
from hypic_apps.cli.options import add_engine_options


def numbers(text: str) -> list[int]:
    """``4,16,64`` as whole numbers of at least 1, for argparse."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 4,16,64")
    return [int(part) for part in parts]


def whole(text: str) -> int:
    """A whole number, 0 included, for argparse."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to below 1, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to below 1, such as 0.25")
    return found


def add_vary(parser: argparse.ArgumentParser) -> None:
    """Whether segments have other lengths in every repetition, as those of real texts do."""
    parser.add_argument("--vary", type=share, default=0.0, metavar="SHARE",
                        help="segments of every repetition are up to so much longer or shorter, each another length; "
                        "the whole stays about as long (default: 0)")  # fmt: skip


def varied(length: int, vary: float) -> str:
    """``1,024``, or ``1,024 +- 25%`` where lengths vary."""
    return f"{length:,} +- {vary:.0%}" if vary else f"{length:,}"


def choices(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """``full,warm`` as names out of ``allowed``, for argparse."""

    def read(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        unknown = [part for part in parts if part not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return parts

    return read


def add_common(parser: argparse.ArgumentParser, default: str = "hypic-tiny") -> None:
    """Geometry, output and engine settings."""
    names = ", ".join([*known(), "hypic-tiny"])
    parser.add_argument("--geometry", default=default, metavar="NAME",
                        help=f"{names}, or a checkpoint folder (default: {default})")  # fmt: skip
    add_output(parser)
    add_engine_options(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", metavar="FILE", help="write the result as JSON too")


def note(text: str) -> None:
    """What is being done, on stderr; a line that is written over where there is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def end_notes() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def with_defaults(settings: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Engine settings; what was given wins."""
    return {**defaults, **settings}


def is_small(device: torch.device, made: Geometry) -> bool:
    """Whether prompts should be short unless asked otherwise: on a CPU, and for small models."""
    return device.type == "cpu" or int(made.config["hidden_size"]) < 512


def shown(args: argparse.Namespace, result: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> int:
    """Writes and prints a result as its flags say; the exit code.

    Raises:
        CommandError: the file cannot be written.
    """
    end_notes()
    if args.save:
        save(Path(args.save), result)
    print(as_json(result) if args.json else text(result))
    return 0


def rates(text: str) -> list[float]:
    """``0.5,1,2`` as numbers above 0, for argparse."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates such as 0.5,1,2")
    return found
