"""``hypic bench encode``: what building ``(T, B)`` adds to running the same tokens.

The same documents, as many at once, are encoded into the store, and run as prompts of their own without any reuse.
Both run the same tokens with the same attention; only the first folds and writes transitions and end states.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic_apps.bench import driving, floors
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_common, add_vary, is_small, note, numbers, shown, varied, whole, with_defaults
from hypic_apps.bench.prompts import Shape, check_cached
from hypic_apps.bench.records import about, device_of_settings, number, percentile, table
from hypic_apps.bench.session import Session, session
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "what building transitions and end states adds to encoding"
EXAMPLES = """
hypic bench encode
hypic bench encode --geometry qwen3.5-4b --segment-tokens 512,1024
"""
DETAILS = """The same documents are encoded, and run as prompts without reuse; what encoding
takes longer is the share of building (T, B)."""
HEADS = ("segments", "encode ms", "p90", "plain ms", "p90", "building", "tokens/s", "floor ms", "runs")


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "encode", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--segments", type=numbers, default=[16], metavar="N,N", help="at once (default: 16)")
    parser.add_argument("--segment-tokens", type=numbers, metavar="N,N", help="(default: 1024; small models 128)")
    add_vary(parser)
    parser.add_argument("--runs", type=positive, default=10, metavar="N", help="repetitions (default: 10)")
    parser.add_argument("--warmup", type=whole, default=2, metavar="N", help="repetitions not counted (default: 2)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    made, settings = geometry(args.geometry), engine_settings(args)
    device = device_of_settings(settings)
    shapes = [Shape(many, length, 0, vary=args.vary) for many in args.segments
              for length in args.segment_tokens or [128 if is_small(device, made) else 1024]]  # fmt: skip
    check_cached(shapes, EngineConfig.of(**settings).policy)
    limits = floors.measure(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    most, longest = max(s.num_segments for s in shapes), max(s.segment_tokens + s.most_varied for s in shapes)
    settings = with_defaults(settings, max_running=most, max_context=longest + 64)
    note(f"building {made.name} on {device}")
    with session(made, settings, ids=True, seed=settings.get("seed", 0)) as built:
        records = [measure(built, shape, args.runs, args.warmup, limits) | {"geometry": made.name} for shape in shapes]
    return shown(args, {**about("encoding with and without building (T, B)"), "records": records}, text)


def measure(built: Session, shape: Shape, runs: int, warmup: int, limits: floors.Limits) -> dict[str, Any]:
    """One shape; both ways in turns, the order changing."""
    seconds: dict[str, list[float]] = {"encode": [], "plain": []}
    for repeat in range(-warmup, runs):
        documents: Sequence[Any] = built.source.documents(shape, repeat)
        segments = [built.source.segment(document) for document in documents]
        for way in ("encode", "plain") if repeat % 2 else ("plain", "encode"):
            built.forget()
            taken = built.call(partial(_one, way, segments, built))
            if repeat >= 0:
                seconds[way].append(taken)
    counts = floors.Counts.of(built.runner.model)
    load = floors.Load(shape.num_tokens, shape.num_segments * shape.segment_tokens**2 / 2, shape.num_tokens)
    encode, plain = (percentile(seconds[way], 50) for way in ("encode", "plain"))
    return {
        "device": str(built.device),
        "num_segments": shape.num_segments,
        "segment_tokens": shape.segment_tokens,
        "vary": shape.vary,
        **{f"{way}_ms_p{p}": 1e3 * percentile(seconds[way], p) for way in seconds for p in (50, 90)},
        "building_share": (encode - plain) / encode,
        "tokens_per_s": shape.num_tokens / encode,
        "floor_ms": 1e3 * load.seconds(counts, limits),
        "runs": runs,
    }


def _one(way: str, segments: Sequence[Piece], built: Session, engine: Engine) -> float:
    if way == "encode":
        return driving.seconds(engine, driving.encode_tasks(segments, built.policy.with_(reuse="segments"), "encode"))
    prompts = [[Piece(segment.ids)] for segment in segments]
    return driving.seconds(engine, driving.answer_tasks(prompts, built.policy.with_(reuse="none"), 1, "plain"))


def text(result: dict[str, Any]) -> str:
    rows = [
        (f"{r['num_segments']} x {varied(r['segment_tokens'], r['vary'])}",
         number(r["encode_ms_p50"]), number(r["encode_ms_p90"]),
         number(r["plain_ms_p50"]), number(r["plain_ms_p90"]), f"{r['building_share']:.1%}",
         number(r["tokens_per_s"]), number(r["floor_ms"]), str(r["runs"]))
        for r in result["records"]
    ]  # fmt: skip
    return table(HEADS, rows)
