"""Flags of ``hypic eval`` to the items that are asked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hypic_apps.cli import findings
from hypic_apps.cli.errors import InputError

if TYPE_CHECKING:
    from hypic_apps.eval.items import Item


def check(args: argparse.Namespace) -> None:
    """The sets exist, and one of them at least holds as many items as are asked for; smaller ones are asked whole.

    Raises:
        InputError: a set is unknown or too small, or flags do not go together.
    """
    from hypic_apps.eval import sets

    unknown = [name for name in args.set or () if name not in sets.NAMES]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no set; there are {', '.join(sets.NAMES)}, and S7 with --data FILE.")
    if args.skip and (args.sweep or args.drift or args.full or args.data):
        raise InputError(f"--skip {args.skip} is for --items of sets; leave out --sweep, --drift, --full and --data.")
    if args.by_place and args.drift:
        raise InputError("--by-place groups answers; leave it out with --drift.")
    if args.value and not args.sweep:
        raise InputError(f"--value {args.value[0]} is of a sweep; name it with --sweep segments or --sweep lengths.")
    if args.sweep and not args.drift or args.full or (args.data and not args.set):
        return  # made to any number, all of them, or as many as a file has
    flag, number = ("--prompts", args.prompts) if args.drift else ("--items", args.items)
    names = (args.set or [findings.MAIN_SET])[:1] if args.drift else args.set or list(sets.DEFAULT)
    most, largest = max((sets.size(name), name) for name in names)
    least, smallest = min((sets.size(name), name) for name in names)
    if args.skip >= least:
        raise InputError(
            f"--skip {args.skip} leaves nothing of {smallest}, which holds {least} items; pass --skip {least - 1} or "
            "less, or name larger sets with --set."
        )
    if number + args.skip > most:
        behind, room = (f" and --skip {args.skip}" if args.skip else ""), most - args.skip
        raise InputError(f"{flag} is {number}{behind}, but {largest} holds {most} items; pass {flag} {room} or less.")


def items(args: argparse.Namespace) -> Mapping[str, list[Item]]:
    """The items by set, or with ``--by-place`` by set and place of the passage that has the answer.

    Raises:
        InputError: a set has no item that rests on one passage.
        ConfigError: the file of ``--data`` cannot be used.
    """
    found = _found(args)
    return _placed(found) if args.by_place else found


def _found(args: argparse.Namespace) -> Mapping[str, list[Item]]:
    from hypic_apps.eval import pool, real, sets

    number = None if args.full else args.skip + args.items
    if args.data:
        made = real.items(Path(args.data).expanduser(), args.passages, number)
        return {**{name: sets.of(name, pool.load(), number) for name in args.set or ()}, real.NAME: made}
    if args.sweep:
        values = args.value or (sets.SEGMENTS if args.sweep == "segments" else sets.LENGTHS)
        return sets.sweep(args.sweep, values, pool.load(), args.items)
    return {name: sets.of(name, pool.load(), number)[args.skip :] for name in args.set or sets.DEFAULT}


def _placed(found: Mapping[str, list[Item]]) -> Mapping[str, list[Item]]:
    from hypic_apps.eval import sets

    without = [name for name, items in found.items() if not sets.by_place({name: items})]
    if without:
        raise InputError(
            f"no item of {', '.join(without)} rests on one passage; with --by-place name others with --set."
        )
    return sets.by_place(found)
