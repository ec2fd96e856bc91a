"""``hypic bench ttft``: arms side by side on a grid of prompts, each cell beside its floor."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.engine import models
from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic.engine.runner import dtype_of
from hypic.engine.task import Task
from hypic.errors import HypicError
from hypic.types import Policy, SamplingParams
from hypic_apps.bench import floors, peer_process, plots, profile, ttft
from hypic_apps.bench.geometries import Geometry, geometry
from hypic_apps.bench.options import (
    add_common,
    add_vary,
    choices,
    is_small,
    note,
    numbers,
    shown,
    varied,
    whole,
    with_defaults,
)
from hypic_apps.bench.peer_process import Told
from hypic_apps.bench.prompts import Shape, check_cached
from hypic_apps.bench.records import about, device_of_settings, number, save, table, write
from hypic_apps.bench.session import Session, session
from hypic_apps.bench.ttft import ARMS, Cell, Plan
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "time to first token: full recompute, prefix, segments cold and warm"
EXAMPLES = """
hypic bench ttft
hypic bench ttft --geometry qwen3.5-4b --segments 4,16 --segment-tokens 256
hypic bench ttft --geometry qwen3.5-4b --peer transformers --save ttft.json
hypic bench ttft --geometry qwen3.5-4b --arms warm --runs 3 --profile warm.txt
hypic bench ttft --geometry qwen3.5-4b --deterministic
hypic bench ttft --geometry qwen3.5-4b --arms cold,warm --vary 0.25
"""
DETAILS = """Every repetition has new documents. Floors are what this chip could do at best,
from its matrix rate and bandwidth measured at the start. With --deterministic
every arm but prefix is measured both ways, and what it costs is printed."""
LONGEST_PROMPT = 100_000


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "ttft", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--arms", type=choices(ARMS), default=list(ARMS), metavar="A,B",
                        help=f"of {','.join(ARMS)} (default: all)")  # fmt: skip
    parser.add_argument("--segments", type=numbers, metavar="N,N", help="segments of a prompt (default: 16)")
    parser.add_argument("--segment-tokens", type=numbers, metavar="N,N",
                        help="tokens of a segment (default: 1024; on a CPU 128)")  # fmt: skip
    add_vary(parser)
    parser.add_argument("--tail-tokens", type=numbers, metavar="N,N",
                        help="tokens of the question (default: 128; on a CPU 32)")  # fmt: skip
    parser.add_argument("--head-tokens", type=whole, default=0, metavar="N",
                        help="live text before the segments, the same in all prompts (default: 0)")  # fmt: skip
    parser.add_argument("--max-prompt-tokens", type=positive, default=LONGEST_PROMPT, metavar="N",
                        help=f"leave out cells of longer prompts (default: {LONGEST_PROMPT})")  # fmt: skip
    parser.add_argument("--ids", action="store_true", help="leave tokenising out; geometries have no tokenizer")
    parser.add_argument("--runs", type=positive, default=10, metavar="N", help="repetitions (default: 10)")
    parser.add_argument("--warmup", type=whole, default=1, metavar="N", help="repetitions not counted (default: 1)")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="stop a cell after the repetition in which so much time is spent")  # fmt: skip
    parser.add_argument("--decode-tokens", type=whole, default=16, metavar="N",
                        help="tokens decoded once for the time of answers; 0 leaves it out (default: 16)")  # fmt: skip
    parser.add_argument("--peer", action="append", choices=("transformers", "prefix"), default=[],
                        help="measure a peer in the same run; may be repeated")  # fmt: skip
    parser.add_argument("--profile", metavar="FILE", help="write where the time of one request goes")
    parser.add_argument("--profile-arm", type=choices(ARMS), default=["warm"], metavar="A,B",
                        help=f"the arms of --profile, of {','.join(ARMS)} (default: warm)")  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", help="draw TTFT against the number and the length of segments")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        InputError: no cell is short enough.
        CommandError: an arm did not do what it says; a file cannot be written.
    """
    made, settings = geometry(args.geometry), engine_settings(args)
    device = device_of_settings(settings)
    shapes, left_out = cells(args, device, made)
    arms = [arm for arm in ARMS if arm in {*args.arms, *args.peer}]
    if settings.pop("deterministic", False):
        arms += [ttft.TWINS[arm] for arm in arms if arm in ttft.TWINS]
    plan = Plan(arms, args.runs, args.warmup, args.budget, args.decode_tokens)
    told = _peer(args, made, device, settings, shapes)
    limits = floors.measure(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    longest = max(shape.most_tokens for shape in shapes)
    # A chat template's text comes on top of what was asked for.
    settings = with_defaults(settings, max_context=longest + args.decode_tokens + 512, max_running=8)
    note(f"building {made.name} on {device}")
    with session(made, settings, ids=args.ids, seed=settings.get("seed", 0)) as built:

        def result(measured: Sequence[Cell], failed: Sequence[str]) -> dict[str, Any]:
            return _result(args, built, made, limits, told, measured, failed, left_out, len(shapes))

        measured, failed = list[Cell](), list[str]()
        for shape in shapes:
            measured += _measured(built, shape, plan, told, shapes, failed)
            if args.save:  # a grid takes long: what is there is kept, whatever ends it
                save(Path(args.save), result(measured, failed))
        code = shown(args, found := result(measured, failed), text) or int(bool(failed))
        if args.plot and found["records"]:
            plots.ttft(found["records"], Path(args.plot))
        if args.profile:
            write(Path(args.profile), "\n".join(_profile(built, shapes[0], arm, limits) for arm in args.profile_arm))
    return code


def _result(
    args: argparse.Namespace, built: Session, made: Geometry, limits: floors.Limits, told: Told | None,
    measured: Sequence[Cell], failed: Sequence[str], left_out: Sequence[str], num_cells: int,
) -> dict[str, Any]:  # fmt: skip
    records = [record for cell in measured for record in ttft.records(built, cell, limits, made.name)]
    return {
        **about("time to first token in milliseconds, by arm and shape of prompt"),
        "limits": {"matmul_tflops": limits.matmul_flops / 1e12, "copy_gb_per_s": limits.copy_bytes / 1e9},
        "tokenising": args.ids is False and made.folder is not None,
        "build_s": built.build_s,
        "seconds": _seconds(built, measured),
        "first_used_on_requests": [] if built.loop.compiled is None else list(built.loop.compiled.names),
        "left_out": list(left_out),
        "failed": list(failed),
        "missing_cells": num_cells - len(measured) - len(failed),
        **ttft.over_cells(records),
        "peer": None if told is None else {"versions": dict(told.versions), "missing": told.missing},
        "records": records,
    }


def _seconds(built: Session, measured: Sequence[Cell]) -> dict[str, float]:
    """Where the time of this run went."""
    warm_up, of_requests = sum(cell.warm_up_s for cell in measured), sum(cell.measured_s for cell in measured)
    prepared = sum(cell.wall_s for cell in measured) - warm_up - of_requests
    return {"building": built.build_s, "warming up": warm_up, "preparing": prepared, "measured requests": of_requests}


def cells(args: argparse.Namespace, device: torch.device, made: Geometry) -> tuple[list[Shape], list[str]]:
    """The shapes of the grid, and those left out as too long.

    Raises:
        InputError: none is left, or segments are so short that they are always run live.
    """
    lengths = args.segment_tokens or [128 if is_small(device, made) else 1024]
    tails = args.tail_tokens or [32 if is_small(device, made) else 128]
    grid = [
        Shape(many, length, tail, args.head_tokens if made.folder is None else 0, args.vary)
        for many in args.segments or [16] for length in lengths for tail in tails
    ]  # fmt: skip
    fitting = [shape for shape in grid if shape.most_tokens <= args.max_prompt_tokens]
    if not fitting:
        raise InputError(f"every prompt is longer than {args.max_prompt_tokens} tokens; raise --max-prompt-tokens.")
    left_out = [f"{shape.num_segments} x {shape.segment_tokens}" for shape in grid if shape not in fitting]
    check_cached(grid, EngineConfig.of(**engine_settings(args)).policy)
    for text in left_out:
        note(f"left out as too long: {text}")
    return fitting, left_out


def _peer(
    args: argparse.Namespace, made: Geometry, device: torch.device, settings: dict[str, Any], shapes: Sequence[Shape]
) -> Told | None:
    """transformers first, while all of the memory is free."""
    if "transformers" not in args.peer:
        return None
    with torch.device("meta"):
        model = models.build(made.config)
    dtype = dtype_of(settings.get("dtype", "auto"), dict(made.config), model, device)
    note(f"transformers: {made.name} on {device}")
    told = peer_process.ask(
        made, str(device), str(dtype).removeprefix("torch."), shapes, args.runs, args.warmup,
        settings.get("threads"), settings.get("seed", 0),
    )  # fmt: skip
    if told.missing:
        note(f"not measured: {told.missing}")
    return told


def _measured(
    built: Session, shape: Shape, plan: Plan, told: Told | None, shapes: Sequence[Shape], failed: list[str]
) -> list[Cell]:
    """A cell, the peer's times beside ours; or none, and why: a grid is not lost to one of its cells."""
    try:
        cell = ttft.measure(built, shape, plan, note)
    except (CommandError, HypicError) as error:
        failed.append(f"{shape.num_segments} x {shape.segment_tokens}: {error}")
        note(f"not measured: {failed[-1]}")
        return []
    if told is not None and not told.missing:
        cell.ttft_s[ttft.PEER] = list(told.seconds[shapes.index(shape)])
    return [cell]


def _profile(built: Session, shape: Shape, arm: str, limits: floors.Limits) -> str:
    """Requests of an arm, prepared as when they are measured, driven on the engine's own thread; their tables."""
    note(f"profiling {arm}")

    def requests() -> Iterator[Callable[[Engine], object]]:
        for repeat in itertools.count(10_000):
            repetition = ttft.Repetition(built, shape, repeat)
            pieces, policy = repetition.prepared(arm)(), repetition.policy(arm)
            built.synchronize()
            yield partial(_drive, pieces, policy, f"profiled-{repeat}")

    counts = floors.Counts.of(built.runner.model)
    load = floors.load_of(arm, shape, built.policy, counts.layout)
    head = f"{arm}, {shape.num_segments} x {shape.segment_tokens} + {shape.tail_tokens} tokens\n"
    head += floors.rooms_text(load, counts, limits)
    return f"{head}\n{profile.take(requests(), built.call, built.device)}"


def _drive(pieces: Sequence[Piece], policy: Policy, id: str, engine: Engine) -> None:
    """One request on the engine's own thread, to its first token; its second one is left."""
    engine.add(Task(id, pieces, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), policy))
    while all(emission.id != id for emission in engine.step()):
        pass


def text(result: dict[str, Any]) -> str:
    """The table, and a line on what it was measured on."""
    heads = ("segments", "arm", "p50 ms", "p90 ms", "runs", "floor ms", "floor ratio", "x full", "x prefix", "x peer",
             "tokens run", "256 tokens", "1,024 tokens")  # fmt: skip
    rows = [
        (
            f"{r['num_segments']} x {varied(r['segment_tokens'], r['vary'])} + {r['tail_tokens']}", r["arm"],
            number(r["ttft_ms_p50"]), number(r["ttft_ms_p90"]), str(r["runs"]),
            number(r["floor_ms"]), number(r["floor_ratio"]),
            number(r.get("ratio_to_full")), number(r.get("ratio_to_prefix")), number(r.get("ratio_to_transformers")),
            "-" if r["computed_tokens"] is None else f"{r['computed_tokens']:,}",
            number(r.get("total_ms_256")), number(r.get("total_ms_1024")),
        )
        for r in result["records"]
    ]  # fmt: skip
    return "\n".join([table(heads, rows), *_remarks(result)])


def _remarks(result: dict[str, Any]) -> list[str]:
    hardware, limits = result["hardware"], result["limits"]
    kept = [r["transitions_kept"] for r in result["records"] if r["transitions_kept"] is not None]
    lines = [
        "",
        f"{hardware.get('gpu') or hardware['cpu']}, torch {hardware['torch']}; measured limits "
        f"{number(limits['matmul_tflops'])} TFLOP/s and {number(limits['copy_gb_per_s'])} GB/s; "
        f"tokenising is {'part of the time' if result['tokenising'] else 'left out'}",
    ]
    for against in ("prefix", "full"):
        gains = result[f"warm_over_{against}"]
        if gains is not None and gains["cells"] > 1:
            lines.append(f"warm over {against}: geometric mean of {gains['cells']} cells {number(gains['mean'])}, "
                         f"smallest {number(gains['smallest'])}")  # fmt: skip
    for arm, cost in result["deterministic_over_plain"].items():
        lines.append(f"deterministic over plain, {arm}: {number(cost['mean'])}, largest {number(cost['largest'])}")
    for arm, cost in result["ms_per_segment"].items():
        lines.append(f"one more segment, {arm}: {cost:.3f} ms")
    lines += [f"failed: {reason}" for reason in result["failed"]]
    lines.append("seconds: " + ", ".join(f"{what} {number(seconds)}" for what, seconds in result["seconds"].items()))
    if result["first_used_on_requests"]:
        names = ", ".join(sorted(set(result["first_used_on_requests"])))
        lines.append(f"compiled on a request's path, which is a fault: {names}")
    if kept:
        lines.append(f"transitions kept: {min(kept):.1%}")
    if result["peer"]:
        missing, versions = result["peer"]["missing"], result["peer"]["versions"]
        said = missing or ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(f"peer: {said}")
    return lines
