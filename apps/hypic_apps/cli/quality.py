"""The measuring half of ``hypic eval``: flags to items and arms, and to who answers them."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic.checkpoints import is_bundled
from hypic_apps.cli import asked, findings, primers
from hypic_apps.cli.engine import device_of, model_folder
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import count, positive

if TYPE_CHECKING:
    from hypic import EngineConfig
    from hypic_apps.eval.arms import Arm
    from hypic_apps.eval.items import Item
    from hypic_apps.eval.measure import Plan
    from hypic_apps.eval.processes import About, Answering
    from hypic_apps.eval.records import Measured, Record

SYSTEM = (
    "Answer from the passages with as few words as possible, copied from them. "
    "If the passages do not say it, answer: not stated."
)
# Requests that run at a time on a GPU, items whose arms do, and what full recompute's log probabilities may take.
GPU_RUNNING, GPU_AT_ONCE, KEPT_BYTES = 256, 48, 2**31


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_flag = parser.add_argument
    add_flag("--set", action="append", metavar="NAME", help="only this set (S1, S2-direct, ... S10); may be repeated")
    add_flag("--arm", action="append", metavar="NAME", help="only this arm beside full; may be repeated")
    add_flag("--knobs", action="store_true", help="also the arms that try to come closer to full recompute")
    add_flag("--primer-file", action="append", metavar="FILE",
             help="also the default policy behind this text, as the arm primer-NAME; may be repeated")  # fmt: skip
    add_flag("--items", type=positive, default=20, metavar="N", help="items of each set (default: 20)")
    add_flag("--skip", type=count, default=0, metavar="N",
             help="leave out the first N items of each set: tune on others than you report (default: 0)")  # fmt: skip
    add_flag("--full", action="store_true", help="all items of each set: 400 to 2,000")
    add_flag("--data", metavar="FILE", help="real questions with gold passages, as JSON lines (.gz too): set S7")
    add_flag("--passages", type=positive, default=8, metavar="N", help="passages for each of --data (default: 8)")
    add_flag("--sweep", choices=("segments", "lengths"), help="one-hop items by number of passages, or their length")
    add_flag("--value", action="append", type=positive, metavar="N",
             help="only this number of passages, or of tokens each, of the sweep; may be repeated")  # fmt: skip
    add_flag("--by-place", action="store_true",
             help="each set by the place of the passage that has the answer, where it is one passage")  # fmt: skip
    add_flag("--drift", action="store_true", help="errors of states and hidden states, by layer")
    add_flag("--check", action="store_true", help="make every set and compare it with its hash; needs no model")
    add_flag("--system", metavar="TEXT", help="system text (default: none for the bundled model, else a short one)")
    add_flag("--timed", type=positive, default=3, metavar="N", help="items of each set to time (default: 3)")
    add_flag("--show", action="append", metavar="FILE", help="only print saved results, of several files in one table")
    add_flag("--processes", type=positive, default=1, metavar="N",
             help="processes with a replica of the model each, sharing the GPUs or cores (default: 1)")  # fmt: skip
    add_flag("--fill", action="append", metavar="PAGE", help="write a page's marked tables anew from saved results")
    add_flag("--at-once", type=positive, metavar="N", help="items answered together (default: 1 on a CPU, else 48)")
    add_flag("--plot", metavar="FILE", help="write an SVG: score against time, or with --drift error by depth")


def run(args: argparse.Namespace) -> findings.Found:
    """Measures what the flags ask for: the result as JSON values and as lines of Markdown.

    Raises:
        InputError: a set or an arm is unknown, or a file cannot be written.
    """
    if args.check:
        return _check()
    if args.show:
        return findings.shown(args.show, args.set or (), args.plot)
    if args.fill:
        return findings.filled(args.fill)
    asked.check(args)
    arms, found = _arms(args), None if args.drift else asked.items(args)
    from hypic_apps.cli import screen
    from hypic_apps.eval.processes import answering

    model_folder(args.model)
    candidates = primers.chosen(args.primer_file or ())
    if candidates and args.drift:
        raise InputError("--primer-file is for answers; with --drift pass the text itself with --primer.")
    system = args.system if args.system is not None else "" if is_bundled(args.model) else SYSTEM
    if found is None:
        return _drift(args, arms, system)
    with ExitStack() as stack:
        with screen.working(screen.notes(), f"loading {args.model or 'the bundled model'}"):
            who = stack.enter_context(answering(args.model, _config(args), args.processes))
            about = who.about
        return _quality(args, who, about, found, arms, candidates, system)


def _config(args: argparse.Namespace) -> EngineConfig:
    """On a GPU, as many requests at a time as steps are recorded for."""
    from hypic import EngineConfig

    settings = engine_settings(args)
    if device_of(EngineConfig.of(**settings)).startswith("cuda"):
        settings.setdefault("max_running", GPU_RUNNING)
    return EngineConfig.of(**settings)


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


def _check() -> findings.Found:
    from hypic_apps.eval import pool, sets
    from hypic_apps.eval.items import digest

    known, found = sets.hashes(), {name: digest(sets.of(name, pool.load())) for name in sets.NAMES}
    differing = [name for name in sets.NAMES if known[name] != found[name]]
    lines = [f"{name}  {found[name]}  {'differs' if name in differing else 'as committed'}" for name in sets.NAMES]
    return {"sets": found, "differing": differing}, lines


def _quality(
    args: argparse.Namespace,
    who: Answering,
    about: About,
    found: Mapping[str, Sequence[Item]],
    arms: Sequence[str],
    candidates: Sequence[Arm],
    system: str,
) -> findings.Found:
    """Set by set; what is done is saved after each, and times are taken last, while nothing else runs."""
    from hypic_apps.eval.measure import Plan, timed
    from hypic_apps.eval.records import Measured, records

    plans = {
        name: Plan(arms, system, args.timed, _at_once(args, about, items), candidates) for name, items in found.items()
    }
    done: dict[str, Measured] = {}

    def result() -> dict[str, Any]:
        made = [record for name in found if name in done for record in records(about.name, done[name])]
        texts = {"primers": {arm.name: arm.primer for arm in candidates}} if candidates else {}
        return {**_as_json(args, about, made), **texts, "missing": [name for name in found if name not in done]}

    for name, measured in _by_set(who, found, plans):
        done[name] = measured
        if args.save:
            findings.save(Path(args.save), result())
    with _bar("timing", len(found)) as advance:
        for name, items in found.items():
            costs = who.perform_alone(timed(name, items, plans[name]), plans[name])
            done[name] = Measured.joined([done[name], costs])
            advance(1)
    whole = result()
    from hypic_apps.eval.records import Record

    made = [Record(**row) for row in whole["records"]]
    return whole, [findings.title(about.name, about.num_parameters), *findings.tables_of(made, args.plot)]


def _by_set(
    who: Answering, found: Mapping[str, Sequence[Item]], plans: Mapping[str, Plan]
) -> Iterator[tuple[str, Measured]]:
    """Every set when all of its blocks are answered; a line tells it."""
    from hypic_apps.cli import screen
    from hypic_apps.eval.measure import units
    from hypic_apps.eval.records import Measured

    todo = [(name, unit) for name, items in found.items() for unit in units(name, items, plans[name])]
    parts: dict[str, dict[int, Measured]] = {name: {} for name in found}
    counts, began_s = Counter(name for name, _ in todo), time.perf_counter()
    console = screen.notes()
    with _bar("asking", sum(len(items) for items in found.values())) as advance:
        for number, measured in who.perform([(unit, plans[name]) for name, unit in todo]):
            name, unit = todo[number]
            parts[name][number] = measured
            advance(len(unit.items))
            if len(parts[name]) == counts[name]:
                seconds = time.perf_counter() - began_s
                console.print(f"{name}: {len(found[name])} items, {seconds:.0f} s", highlight=False)
                yield name, Measured.joined([part for _, part in sorted(parts.pop(name).items())])


def _at_once(args: argparse.Namespace, about: About, items: Sequence[Item]) -> int:
    """Items answered together: one on a CPU, else dozens, as far as log probabilities of their answers fit."""
    from hypic_apps.eval.measure import MOST_TOKENS

    if args.at_once:
        return int(args.at_once)
    if about.device == "cpu":
        return 1
    most = max(MOST_TOKENS[item.form] for item in items)
    return max(1, min(GPU_AT_ONCE, KEPT_BYTES // (4 * most * about.vocab_size)))


def _drift(args: argparse.Namespace, arms: Sequence[str], system: str) -> findings.Found:
    from hypic_apps.cli import screen
    from hypic_apps.eval import drift, plot, pool, sets
    from hypic_apps.eval.driver import Subject
    from hypic_apps.eval.processes import About

    items = sets.of(args.set[0] if args.set else findings.MAIN_SET, pool.load(), args.prompts)
    with screen.working(screen.notes(), f"loading {args.model or 'the bundled model'}"):
        # Layers that are recorded are not looked into.
        subject = Subject(args.model, replace(_config(args), graphs=False))
    with _bar("looking", len(items)) as advance:
        found = drift.measure(subject, items, arms, system, lambda: advance(1))
    if args.plot:
        findings.write(Path(args.plot), plot.drift_by_depth(found))
    about = About.of(subject)
    lines = [findings.title(about.name, about.num_parameters), *findings.drift_tables_of(found)]
    return {**_as_json(args, about, []), "drift": [asdict(d) for d in found]}, lines


def _as_json(args: argparse.Namespace, about: About, records: Sequence[Record]) -> dict[str, Any]:
    import hypic
    from hypic_apps.cli.hardware import hardware

    return {
        "what": "answers of every arm against full recompute on the same items, 95 % intervals",
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["hypic", *sys.argv[1:]]),
        "hypic": hypic.__version__,
        **hardware(),
        "model": about.name,
        "num_parameters": about.num_parameters,
        "fingerprint": about.fingerprint,
        "note": findings.NO_EVIDENCE,
        "records": [asdict(record) for record in records],
    }


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from hypic_apps.cli import screen

    with screen.progress(screen.notes()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
