"""The measuring half of ``hypic eval``: flags to items and arms, records to tables, plots and JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.engine import model_folder
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import positive

if TYPE_CHECKING:
    from hypic_apps.eval.driver import Subject
    from hypic_apps.eval.items import Item
    from hypic_apps.eval.measure import Record

SYSTEM = (
    "Answer from the passages with as few words as possible, copied from them. "
    "If the passages do not say it, answer: not stated."
)
NO_EVIDENCE = "no evidence for larger models"
MAIN_SET = "S1"
Found = tuple[dict[str, Any], list[str]]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_flag = parser.add_argument
    add_flag("--set", action="append", metavar="NAME", help="only this set (S1, S2-direct, ... S9); may be repeated")
    add_flag("--arm", action="append", metavar="NAME", help="only this arm beside full; may be repeated")
    add_flag("--knobs", action="store_true", help="also the arms that try to come closer to full recompute")
    add_flag("--items", type=positive, default=20, metavar="N", help="items of each set (default: 20)")
    add_flag("--full", action="store_true", help="all items of each set: 400 to 2,000")
    add_flag("--data", metavar="FILE", help="real questions with gold passages, as JSON lines (.gz too): set S7")
    add_flag("--passages", type=positive, default=8, metavar="N", help="passages for each of --data (default: 8)")
    add_flag("--sweep", choices=("segments", "lengths"), help="one-hop items by number of passages, or their length")
    add_flag("--drift", action="store_true", help="errors of states and hidden states, by layer")
    add_flag("--check", action="store_true", help="make every set and compare it with its hash; needs no model")
    add_flag("--system", metavar="TEXT", help="system text (default: none for the bundled model, else a short one)")
    add_flag("--timed", type=positive, default=3, metavar="N", help="items of each set to time (default: 3)")
    add_flag("--show", action="append", metavar="FILE", help="only print saved results, of several files in one table")
    add_flag("--at-once", type=positive, metavar="N", help="items answered together (default: 1 on a CPU, else 32)")
    add_flag("--plot", metavar="FILE", help="write an SVG: score against time, or with --drift error by depth")


def run(args: argparse.Namespace) -> Found:
    """Measures what the flags ask for: the result as JSON values and as lines of Markdown.

    Raises:
        InputError: a set or an arm is unknown, or a file cannot be written.
    """
    if args.check:
        return _check()
    if args.show:
        return _shown([_saved(Path(name).expanduser()) for name in args.show], args.plot)
    arms, settings = _arms(args), {"threads": None, **engine_settings(args)}
    found = None if args.drift else _items(args)
    from hypic import EngineConfig
    from hypic_apps.cli import screen
    from hypic_apps.eval.driver import Subject

    console = screen.notes()
    model_folder(args.model)
    with screen.working(console, f"loading {args.model or 'the bundled model'}"):
        subject = Subject(args.model, EngineConfig.of(**settings))
    system = args.system if args.system is not None else "" if args.model is None else SYSTEM
    if found is None:
        return _drift(args, subject, arms, system)
    return _quality(args, subject, found, arms, system)


def _arms(args: argparse.Namespace) -> list[str]:
    from hypic_apps.eval import drift
    from hypic_apps.eval.arms import ARMS, DEFAULT, FULL, KNOBS

    unknown = [name for name in args.arm or () if name not in ARMS]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no arm; there are {', '.join(ARMS)}.")
    if args.drift:
        return list(args.arm or drift.ARM_NAMES)
    chosen = [FULL, *args.arm] if args.arm else list(DEFAULT)
    return list(dict.fromkeys([*chosen, *(KNOBS if args.knobs else ())]))


def _items(args: argparse.Namespace) -> Mapping[str, list[Item]]:
    from hypic_apps.eval import pool, real, sets

    number = None if args.full else args.items
    unknown = [name for name in args.set or () if name not in sets.NAMES]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no set; there are {', '.join(sets.NAMES)}, and S7 with --data FILE.")
    if args.data:
        made = real.items(Path(args.data).expanduser(), args.passages, number)
        return {**{name: sets.of(name, pool.load(), number) for name in args.set or ()}, real.NAME: made}
    if args.sweep:
        values = sets.SEGMENTS if args.sweep == "segments" else sets.LENGTHS
        return sets.sweep(args.sweep, values, pool.load(), args.items)
    # Without a chat template that knows tools, the ninth set would only be noise; it is run when asked for.
    return {name: sets.of(name, pool.load(), number) for name in args.set or sets.SETS}


def _check() -> Found:
    from hypic_apps.eval import pool, sets
    from hypic_apps.eval.items import digest

    known, found = sets.hashes(), {name: digest(sets.of(name, pool.load())) for name in sets.NAMES}
    differing = [name for name in sets.NAMES if known[name] != found[name]]
    lines = [f"{name}  {found[name]}  {'differs' if name in differing else 'as committed'}" for name in sets.NAMES]
    return {"sets": found, "differing": differing}, lines


def _saved(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}); name a file that --save wrote.") from error
    if not isinstance(found, dict) or "records" not in found:
        raise InputError(f"{str(path)!r} holds no records; name a file that --save wrote.")
    return found


def _shown(saved: Sequence[dict[str, Any]], plot_to: str | None) -> Found:
    from hypic_apps.eval.measure import Record

    records = [Record(**row) for one in saved for row in one["records"]]
    about = [_title(*pair) for pair in dict.fromkeys((one["model"], one["num_parameters"]) for one in saved)]
    return {**saved[0], "records": [asdict(r) for r in records]}, [*about, *_tables(records, plot_to)]


def _tables(records: Sequence[Record], plot_to: str | None) -> list[str]:
    from hypic_apps.eval import plot, tables

    sets = list(dict.fromkeys(record.set for record in records))
    if plot_to and sets:
        _write(Path(plot_to), plot.quality_against_time(records, MAIN_SET if MAIN_SET in sets else sets[0]))
    made = (tables.quality(records), tables.gaps(records), tables.likeness(records), tables.others(records))
    return [line for table in made if table for line in ("", *table)]


def _quality(
    args: argparse.Namespace, subject: Subject, found: Mapping[str, Sequence[Item]], arms: Sequence[str], system: str
) -> Found:
    from hypic_apps.eval.measure import Plan, measure, records

    at_once = args.at_once or (1 if subject.runner.pool.device.type == "cpu" else 32)
    plan, out = Plan(arms, system, args.timed, at_once), list[Any]()
    total = sum(len(items) for items in found.values())
    with _bar("asking", total) as advance:
        for name, items in found.items():
            out += records(subject.name, measure(subject, name, items, plan, advance))
    title = _title(subject.name, subject.num_parameters)
    return _as_json(args, subject, out), [title, *_tables(out, args.plot)]


def _drift(args: argparse.Namespace, subject: Subject, arms: Sequence[str], system: str) -> Found:
    from hypic_apps.eval import drift, plot, pool, sets, tables

    items = sets.of(args.set[0] if args.set else MAIN_SET, pool.load(), args.prompts)
    with _bar("looking", len(items)) as advance:
        found = drift.measure(subject, items, arms, system, advance)
    if args.plot:
        _write(Path(args.plot), plot.drift_by_depth(found))
    main = next((d for d in found if d.arm == "transition"), found[0])
    title = _title(subject.name, subject.num_parameters)
    lines = [title, "", *tables.drift(found), "", f"Cached tokens, {main.arm}:", "", *tables.distance(main)]
    return {**_as_json(args, subject, []), "drift": [asdict(d) for d in found]}, lines


def _title(model: str, num_parameters: int) -> str:
    size = f"{num_parameters / 1e6:.1f} million parameters"
    return f"{model}, {size}: {NO_EVIDENCE}." if num_parameters < 1e9 else f"{model}, {size}."


def _as_json(args: argparse.Namespace, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
    import hypic
    from hypic_apps.cli.hardware import hardware

    return {
        "what": "answers of every arm against full recompute on the same items, 95 % intervals",
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["hypic", *sys.argv[1:]]),
        "hypic": hypic.__version__,
        **hardware(),
        "model": subject.name,
        "num_parameters": subject.num_parameters,
        "fingerprint": subject.runner.identity.fingerprint,
        "note": NO_EVIDENCE,
        "records": [asdict(record) for record in records],
    }


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    from hypic_apps.cli import screen

    with screen.progress(screen.notes()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror}; name another file.") from error
