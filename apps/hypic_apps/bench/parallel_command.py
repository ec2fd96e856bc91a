"""``hypic bench parallel``: cold requests over 1 to N workers, the planner against its baseline, simulated fleets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.engine.parallel.assign import PLANNERS
from hypic.engine.parallel.cost import UNMEASURED_LINK, EncodeCost, EntrySize, LinkCost
from hypic.engine.parallel.simulate import MOST_WORKERS, Fleet, Trace, cold_request_s, play, uneven_ratio
from hypic.engine.parallel.transport import NAMES
from hypic_apps.bench import parallel
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_common, end_notes, note, numbers, whole, with_defaults
from hypic_apps.bench.parallel_plot import draw
from hypic_apps.bench.records import about, number, save, table
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "cold requests over several workers; fleets of workers simulated"
EXAMPLES = """
hypic bench parallel
hypic bench parallel --geometry qwen3.5-35b-a3b --counts 1,2,4,8 --shapes 64x1024,11x2400 --save parallel.json
hypic bench parallel --counts 1 --simulate 8,64,1024
hypic bench parallel --cost 0.016,2e-5,2e-10 --simulate 8,64,1024
"""
DETAILS = """All workers are started once and fewer are used for smaller counts. Every request is
of new random documents. --simulate plays the same planner against the costs that
were measured, or against those of --cost (seconds a step, a token, a pair of tokens)."""
# An entry of the 35-billion-parameter geometry, for costs that come from the command line.
LARGE_ENTRY = EntrySize(123 * 2**20, 20 * 2**10)
NVLINK = LinkCost(2e-4, 1 / 2e11)
Result = dict[str, Any]


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
    parser.add_argument("--load", type=float, default=0.5, metavar="SHARE",
                        help="work that arrives, as a share of what a simulated fleet can do (0.5)")  # fmt: skip
    parser.add_argument("--fail-rate", type=float, default=0.0, metavar="SHARE",
                        help="simulated share of pieces of work that fail (default: 0)")  # fmt: skip
    parser.add_argument("--cost", type=cost, metavar="S,T,P", help="simulate with these costs and measure nothing")
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
        return EncodeCost(step_s, token_s, pair_s)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no cost such as 0.016,2e-5,2e-10") from error


def run(args: argparse.Namespace) -> int:
    """Measures, simulates and prints.

    Raises:
        InputError: a fleet is too large to simulate.
        CommandError: several workers do not give one worker's answer.
    """
    if args.simulate and max(args.simulate) > MOST_WORKERS:
        raise InputError(f"a fleet of {max(args.simulate)} is too large; simulate up to {MOST_WORKERS} workers.")
    result = about("cold requests over several workers; times in milliseconds")
    if args.cost is None:
        result |= _measured(args)
    else:
        result["cost"] = {"encode": vars(args.cost), "link": vars(NVLINK), "entry": vars(LARGE_ENTRY)}
    if args.simulate:
        result["simulated"] = [_simulated(args, result["cost"], count) for count in args.simulate]
    end_notes()
    if args.save:
        save(Path(args.save), result)
    if args.plot and result.get("even"):
        draw(result, Path(args.plot))
    print(json.dumps(result, indent=1) if args.json else text(result))
    wrong = [c for c in result.get("checked", ()) if not c["same_token"]]
    if wrong:
        raise CommandError(f"{wrong[0]['workers']} workers gave another token than one; the times mean nothing.")
    return 0


def _measured(args: argparse.Namespace) -> Result:
    made, settings = geometry(args.geometry), engine_settings(args)
    is_gpu = torch.cuda.is_available() and settings.get("device", "auto") != "cpu"
    counts = sorted(set(args.counts or _counts(is_gpu)))
    wanted = args.shapes or [(16, 1024 if is_gpu else 128)]
    mean = wanted[0][1]
    longest = max([count * tokens for count, tokens in wanted] + [2 * args.uneven * mean])
    random_weights = {} if made.folder is not None else {"load_format": "dummy"}
    own = {} if is_gpu else {"threads": 1}
    defaults = {**random_weights, **own, "max_context": longest + args.tail_tokens + 512, "max_running": 4}
    config = EngineConfig.of(**with_defaults(settings, **defaults, workers=max(counts)))
    note(f"starting {config.workers} workers of {made.name}")
    with made.placed() as folder, parallel.rig(folder, config, args.tail_tokens, args.carrier) as rig:
        checked = [parallel.check(rig, count, wanted[0][1]) for count in counts if count > 1]
        even = [parallel.even(rig, counts, shape, args.runs, note) for shape in wanted]
        uneven = [
            parallel.uneven(rig, count, mean, args.uneven, args.seeds, note)
            for count in counts if count > 1 and args.uneven
        ]  # fmt: skip
        found = _costs(rig)
    flat = [{**record, "geometry": made.name} for records in even for record in records]
    return {"geometry": made.name, "checked": checked, "even": flat, "uneven": uneven, "cost": found}


def _counts(is_gpu: bool) -> list[int]:
    most = torch.cuda.device_count() if is_gpu else 2
    return [count for count in (1, 2, 4, 8, 16) if count <= most] or [1]


def _costs(rig: parallel.Rig) -> Result:
    """What was measured and observed: the planner's own numbers."""
    layout = rig.started.loop.call(lambda engine: engine.runner.pool.layout)
    link, encode = UNMEASURED_LINK, None
    if rig.workers is not None:
        peers = rig.workers.peers
        encode = peers.cost
        link = next((peer.link for peer in peers.view.peers.values()), link)
    entry = EntrySize(layout.state_bytes + layout.transition_bytes, layout.token_bytes)
    return {"encode": None if encode is None else vars(encode), "link": vars(link), "entry": vars(entry)}


def _simulated(args: argparse.Namespace, found: Result, count: int) -> Result:
    if found["encode"] is None:
        raise InputError("one worker measures no cost to simulate with; pass --counts 1,2 or --cost.")
    note(f"simulating {count} workers")
    fleet = Fleet(
        num_workers=count,
        encode=EncodeCost(**found["encode"]),
        link=LinkCost(**found["link"]),
        size=EntrySize(**found["entry"]),
        combine_s=EncodeCost(**found["encode"]).seconds(256),
        fail_rate=args.fail_rate,
    )
    # Half of a request's segments are taken to be found somewhere.
    service_s = fleet.combine_s + 12 * fleet.encode.marginal_s(512)
    trace = Trace(args.requests, rate_s=args.load * count / service_s)
    played = {name: play(fleet, trace, name) for name in PLANNERS}
    return {
        "workers": count,
        "cold_64x1024_speedup": _cold_speedup(fleet),
        "uneven_ratio": uneven_ratio(fleet, 32, 1024, parallel.SIGMA, 20),
        **{
            f"{name}_ttft_ms": {f"p{p}": 1e3 * one.percentile(p / 100) for p in (50, 90, 99)}
            for name, one in played.items()
        },
        "hits": played["longest-first"].hits,
        "fetched": played["longest-first"].fetched,
        "encoded": played["longest-first"].encoded,
        "recomputed": played["longest-first"].recomputed,
        "busy_share": played["longest-first"].busy_share,
    }


def _cold_speedup(fleet: Fleet) -> float:
    one = Fleet(1, fleet.encode, fleet.link, fleet.size, fleet.combine_s)
    return cold_request_s(one, [1024] * 64, "longest-first") / cold_request_s(fleet, [1024] * 64, "longest-first")


def text(result: Result) -> str:
    """The tables."""
    parts = [part for part in (_even(result), _uneven(result), _fleets(result), _checks(result)) if part]
    return "\n\n".join(parts)


def _even(result: Result) -> str:
    heads = ("segments", "workers", "p50 ms", "p90 ms", "speedup", "dispatch ms", "exchange ms", "combine ms", "sent",
             "GB/s a link")  # fmt: skip
    rows = [
        (
            f"{r['segments']} x {r['segment_tokens']:,}", str(r["workers"]), number(r["ttft_ms_p50"]),
            number(r["ttft_ms_p90"]), number(r["speedup"]), number(r["dispatch_ms"]), number(r["exchange_ms"]),
            number(r["combine_ms"]), number(r["entries_sent"]), number(r["link_gb_per_s"]),
        )
        for r in result.get("even", ())
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _uneven(result: Result) -> str:
    heads = ("uneven segments", "workers", "longest first ms", "round robin ms", "ratio", "seeds")
    rows = [
        (
            f"{r['segments']} of about {r['mean_tokens']:,}", str(r["workers"]), number(r["longest-first_ms_p50"]),
            number(r["round-robin_ms_p50"]), number(r["ratio_p50"]), str(r["seeds"]),
        )
        for r in result.get("uneven", ())
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _fleets(result: Result) -> str:
    heads = ("simulated workers", "64 x 1k", "uneven", "p50 ms", "p90 ms", "p99 ms", "round robin p90 ms", "busy")
    rows: Sequence[Sequence[str]] = [
        (
            str(r["workers"]), number(r["cold_64x1024_speedup"], "x"), number(r["uneven_ratio"], "x"),
            *(number(r["longest-first_ttft_ms"][p]) for p in ("p50", "p90", "p99")),
            number(r["round-robin_ttft_ms"]["p90"]), f"{r['busy_share']:.0%}",
        )
        for r in result.get("simulated", ())
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _checks(result: Result) -> str:
    return "\n".join(
        f"{c['workers']} workers: {'the same' if c['same_token'] else 'ANOTHER'} token as one, entries differ by "
        f"{c['entries_differ_by']:.1e} at most"
        for c in result.get("checked", ())
    )
