"""``hypic bench parallel``: cold requests over 1 to N workers, the planner against its baseline, simulated fleets."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.engine.parallel.cost import UNMEASURED_LINK, EncodeCost, EntrySize, LinkCost
from hypic.engine.parallel.simulate import MOST_WORKERS
from hypic.engine.parallel.transport import NAMES
from hypic.errors import HypicError
from hypic_apps.bench import parallel
from hypic_apps.bench.geometries import Geometry, geometry
from hypic_apps.bench.options import add_common, end_notes, note, numbers, share, whole, with_defaults
from hypic_apps.bench.parallel_check import check
from hypic_apps.bench.parallel_plot import draw
from hypic_apps.bench.parallel_runs import Clock, even, fetch, uneven
from hypic_apps.bench.parallel_simulated import combine, simulated
from hypic_apps.bench.parallel_text import text
from hypic_apps.bench.records import about, as_json, save
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, above_zero, add_command, positive

SUMMARY = "cold requests over several workers; fleets of workers simulated"
EXAMPLES = """
hypic bench parallel
hypic bench parallel --geometry qwen3.5-35b-a3b,ring-mini-linear-2.0 --shapes 64x1024,11x2400 --save p.json --plot p.png
hypic bench parallel --counts 1 --simulate 8,64,1024
hypic bench parallel --cost 0.016,2e-5,2e-10 --simulate 8,64,1024
"""
DETAILS = """All workers are started once and fewer are used for smaller counts. Every request is
of new random documents. Several geometries are measured one after the other, and what
there is is saved after each step. --simulate plays the same planner against the costs that
were measured, or against those of --cost (seconds a step, a token, a pair of tokens)."""
# An entry of the 35-billion-parameter geometry, for costs that come from the command line.
LARGE_ENTRY = EntrySize(123 * 2**20, 20 * 2**10)
NVLINK = LinkCost(2e-4, 1 / 2e11)
Result = dict[str, Any]
Shapes = Sequence[tuple[int, int]]


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "parallel", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--counts", type=numbers, metavar="N,N",
                        help="numbers of workers (default: 1,2,4... up to the GPUs; on a CPU 1,2)")  # fmt: skip
    parser.add_argument("--shapes", type=shapes, metavar="NxT,NxT",
                        help="even requests: segments x tokens (default: 16x1024; on a CPU 16x128)")  # fmt: skip
    parser.add_argument("--uneven", type=whole, default=32, metavar="N",
                        help="lognormal segments of the uneven requests; 0 leaves them out (default: 32)")  # fmt: skip
    parser.add_argument("--seeds", type=positive, default=20, metavar="N", help="uneven requests (default: 20)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--tail-tokens", type=positive, default=32, metavar="N", help="of the question (default: 32)")
    parser.add_argument("--carrier", choices=NAMES, default="auto", help="how entries travel (default: auto)")
    parser.add_argument("--simulate", type=numbers, metavar="N,N", help="also simulate fleets of so many workers")
    parser.add_argument("--requests", type=positive, default=500, metavar="N", help="simulated (default: 500)")
    parser.add_argument("--load", type=above_zero, default=0.5, metavar="SHARE",
                        help="work that arrives, as a share of what a simulated fleet can do (0.5)")  # fmt: skip
    parser.add_argument("--fail-rate", type=share, default=0.0, metavar="SHARE",
                        help="simulated share of pieces of work that fail (default: 0)")  # fmt: skip
    parser.add_argument("--cost", type=cost, metavar="S,T,P", help="simulate with these costs and measure nothing")
    parser.add_argument("--budget", type=above_zero, metavar="SECONDS",
                        help="of a geometry; afterwards each measurement is made once")  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", help="draw times and speedup against workers")
    add_common(parser)
    parser.set_defaults(run=run)


def shapes(text: str) -> list[tuple[int, int]]:
    """``64x1024,11x2400``, for argparse."""
    found = [part.strip().split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(n.isdigit() and int(n) > 0 for n in pair) for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 64x1024,11x2400")
    return [(int(count), int(tokens)) for count, tokens in found]


def cost(text: str) -> EncodeCost:
    """``0.016,2e-5,2e-10``, for argparse."""
    try:
        step_s, token_s, pair_s = (float(part) for part in text.split(","))
        found = EncodeCost(step_s, token_s, pair_s)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no cost such as 0.016,2e-5,2e-10") from error
    if not found.seconds(1):
        raise argparse.ArgumentTypeError(f"{text!r} costs nothing; pass a cost such as 0.016,2e-5,2e-10")
    return found


def run(args: argparse.Namespace) -> int:
    """Measures, simulates and prints.

    Raises:
        InputError: a fleet is too large to simulate.
        CommandError: several workers do not give one worker's answer, or a geometry cannot be measured.
    """
    if args.simulate and max(args.simulate) > MOST_WORKERS:
        raise InputError(f"a fleet of {max(args.simulate)} is too large; simulate up to {MOST_WORKERS} workers.")
    result = {**about("cold requests over several workers; times in milliseconds"), "runs": []}
    for name in args.geometry.split(",") if args.cost is None else ():
        _measure(args, name, result)
    if args.simulate:
        costs = args.cost and {"encode": vars(args.cost), "link": vars(NVLINK), "entry": vars(LARGE_ENTRY)}
        measured = result["runs"][-1] if costs is None else {}
        costs = costs or measured.get("cost", {"encode": None})
        result["simulated"] = [
            simulated(costs, count, combine(measured.get("even", ())), args.requests, args.load, args.fail_rate)
            for count in args.simulate
        ]
    end_notes()
    _keep(args, result)
    if args.plot and any(run["even"] for run in result["runs"]):
        draw(result, Path(args.plot))
    print(as_json(result) if args.json else text(result))
    _demand_sound(result)
    return 0


def _keep(args: argparse.Namespace, result: Result) -> None:
    """What there is so far, so that a run that is broken off leaves what it measured."""
    if args.save:
        save(Path(args.save), result)


def _demand_sound(result: Result) -> None:
    """Raises ``CommandError`` for what makes the times worthless."""
    for run in result["runs"]:
        if "error" in run:
            raise CommandError(f"{run['geometry']}: {run['error']}")
        for checked in run["checked"]:
            if not checked["is_right"]:
                found = f"{run['geometry']}: {checked['workers']} workers do not give what one gives"
                raise CommandError(f"{found}; the times mean nothing.")


def _measure(args: argparse.Namespace, name: str, result: Result) -> None:
    """All of one geometry, kept bit by bit."""
    made, settings = geometry(name), engine_settings(args)
    is_gpu = torch.cuda.is_available() and settings.get("device", "auto") != "cpu"
    counts = sorted(set(args.counts or _counts(is_gpu)))
    wanted = args.shapes or [(16, 1024 if is_gpu else 128)]
    config = _config(args, settings, made, counts, wanted, is_gpu)
    run: Result = {"geometry": made.name, "checked": [], "even": [], "uneven": [], "fetched": []}
    result["runs"].append(run)
    note(f"starting {config.workers} workers of {made.name}")
    began_s = time.monotonic()
    try:
        with made.placed() as folder, parallel.rig(folder, config, args.tail_tokens, args.carrier) as rig:
            run |= {"start_s": time.monotonic() - began_s, **_described(rig)}
            for part, record in _parts(args, rig, counts, wanted):
                if part == "uneven" and run[part] and run[part][-1]["workers"] == record["workers"]:
                    run[part].pop()  # that of fewer seeds
                run[part].append(record)
                run["cost"] = _costs(rig)
                _keep(args, result)
    except (HypicError, CommandError) as error:  # the other geometries are measured all the same
        run["error"] = str(error)


def _config(
    args: argparse.Namespace, settings: Result, made: Geometry, counts: Sequence[int], wanted: Shapes, is_gpu: bool
) -> EngineConfig:
    longest = max([count * tokens for count, tokens in wanted] + [2 * args.uneven * wanted[0][1]])
    random_weights = {} if made.folder is not None else {"load_format": "dummy"}
    own = {} if is_gpu else {"threads": 1}
    defaults = {**random_weights, **own, "max_context": longest + args.tail_tokens + 512, "max_running": 4}
    return EngineConfig.of(**with_defaults(settings, **defaults, workers=max(counts)))


def _parts(
    args: argparse.Namespace, rig: parallel.Rig, counts: Sequence[int], wanted: Shapes
) -> Iterator[tuple[str, Result]]:
    """Everything that is compared and measured, in the order of its worth, one number of workers after the other."""
    several, clock = [count for count in counts if count > 1], Clock.of(args.budget)
    for count in several:
        note(f"{count} workers compared with one")
        yield "checked", check(rig, count, wanted[0][1])
    for record in even(rig, counts, wanted[0], args.runs, clock, note):
        yield "even", record
    for count in several:
        yield "fetched", fetch(rig, count, wanted[0], args.runs, clock, note)
    for count in several[::-1] if args.uneven else ():
        for record in uneven(rig, count, wanted[0][1], args.uneven, args.seeds, clock, note):
            yield "uneven", record
    for shape in wanted[1:]:
        for record in even(rig, counts, shape, args.runs, clock, note):
            yield "even", record


def _counts(is_gpu: bool) -> list[int]:
    most = torch.cuda.device_count() if is_gpu else 2
    return [count for count in (1, 2, 4, 8, 16) if count <= most] or [1]


def _described(rig: parallel.Rig) -> Result:
    layout, peers = rig.layout, rig.workers and rig.workers.peers.view.peers.values()
    return {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "carriers": sorted({peer.carrier for peer in peers or ()}),
        "devices": sorted({peer.hello.device for peer in peers or ()}),
    }


def _costs(rig: parallel.Rig) -> Result:
    """What was measured and observed: the planner's own numbers."""
    layout, link, encode, handling = rig.layout, UNMEASURED_LINK, None, dict[str, float]()
    if rig.workers is not None:
        peers = rig.workers.peers
        encode = peers.pace.cost
        link = next((peer.link for peer in peers.view.peers.values()), link)
        handling = {
            "receive_s": peers.placing.receive_s,
            "send_s": peers.placing.send_s,
            "slower": max((peer.slower for peer in peers.view.peers.values()), default=1.0),
        }
    entry = EntrySize(layout.state_bytes + layout.transition_bytes, layout.token_bytes)
    found = {"link": vars(link), "entry": vars(entry), "handling": handling}
    return {"encode": None if encode is None else vars(encode), **found}
