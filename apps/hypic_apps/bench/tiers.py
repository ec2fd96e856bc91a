"""``hypic bench tiers``: the time to first token when segments come from the device, the host or disk, or not at all.

The same documents are asked in turns: held on the device; evicted into host memory; only on disk, dropped from the
system's page cache as far as it lets us; known to nobody, so that they are encoded; and on disk with the engine's own
choice, entry by entry, between loading and encoding. In the first three arms loading is forced.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_common, is_small, note, numbers, shown, whole, with_defaults
from hypic_apps.bench.prompts import Shape
from hypic_apps.bench.records import about, device_of_settings, number, percentile, table
from hypic_apps.bench.session import Session, session
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "time to first token by where the segments are: device, host, disk, nowhere"
EXAMPLES = """
hypic bench tiers
hypic bench tiers --geometry qwen3.5-4b --segments 4 --disk-size 40GiB
"""
DETAILS = """Loading from a tier against encoding anew, and what the engine chooses. The disk
tier is a new folder under --folder, removed afterwards."""
ARMS = ("encode", "device", "host", "disk", "chosen")
SHOWN = ("device", "host", "disk", "encode", "chosen")
HEADS = ("segments", *(f"{arm} ms" for arm in SHOWN), "loaded", "entry KiB", "T kept", "runs")
ALWAYS_LOAD_S = 1e6


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "tiers", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--segments", type=positive, default=8, metavar="N", help="of a prompt (default: 8)")
    parser.add_argument("--segment-tokens", type=numbers, metavar="N,N", help="(default: 256,512,1024; small 64,128)")
    parser.add_argument("--tail-tokens", type=positive, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--host-size", default="8GiB", metavar="SIZE", help="of the host tier (default: 8GiB)")
    parser.add_argument("--disk-size", default="8GiB", metavar="SIZE", help="of the disk tier (default: 8GiB)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the disk tier is made (default: temporary)")
    parser.add_argument("--runs", type=positive, default=10, metavar="N", help="repetitions (default: 10)")
    parser.add_argument("--warmup", type=whole, default=2, metavar="N", help="repetitions not counted (default: 2)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    made, settings = geometry(args.geometry), engine_settings(args)
    device = device_of_settings(settings)
    lengths = args.segment_tokens or ([64, 128] if is_small(device, made) else [256, 512, 1024])
    shapes = [Shape(args.segments, length, args.tail_tokens) for length in lengths]
    settings = with_defaults(settings, max_running=4, max_context=max(shape.num_tokens for shape in shapes) + 64)
    note(f"building {made.name} on {device}")
    with tempfile.TemporaryDirectory(prefix="hypic-tiers-", dir=args.folder) as folder:
        settings["store"] = f"host://{args.host_size},disk://{folder}?size={args.disk_size}"
        with session(made, settings, ids=True, seed=settings.get("seed", 0)) as built:
            records = [measure(built, shape, args.runs, args.warmup) | {"geometry": made.name} for shape in shapes]
    return shown(args, {**about("segments from every tier"), "records": records}, text)


def measure(built: Session, shape: Shape, runs: int, warmup: int) -> dict[str, Any]:
    """One shape; all arms in every repetition, with new documents."""
    policy = built.policy.with_(reuse="segments")
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    loaded, rate, size, kept = [], 0.0, 0, (0, 0)
    for repeat in range(-warmup, runs):
        documents: Sequence[Any] = built.source.documents(shape, repeat)
        segments = [built.source.segment(document) for document in documents]
        for arm in ARMS:
            _prepare(built, arm, segments, rate)
            answered = built.ask(built.source.prompt(shape, documents, f"{repeat} {arm}"), policy)
            rate = built.call(_encode_rate) if arm == "encode" else rate
            if repeat >= 0:
                seconds[arm].append(answered.ttft_s)
                loaded += [s.outcome == "hit" for s in answered.report.segments] if arm == "chosen" else []
        size, kept = built.call(_stored)
    return {
        "device": str(built.device),
        "num_segments": shape.num_segments,
        "segment_tokens": shape.segment_tokens,
        **{f"{arm}_ms_p{p}": 1e3 * percentile(seconds[arm], p) for arm in ARMS for p in (50, 90)},
        "loaded_share": sum(loaded) / len(loaded),
        "entry_bytes": size,
        "num_kept_heads": list(kept),
        "runs": runs,
    }


def _prepare(built: Session, arm: str, segments: Sequence[Piece], rate: float) -> None:
    """Entries where the arm wants them, and nowhere faster."""
    if arm == "encode":
        built.forget()
        return
    if arm == "device":
        built.encode(segments, built.policy.with_(reuse="segments"))
        built.call(_save)
    built.call(partial(_place, arm=arm, rate=rate))


def _encode_rate(engine: Engine) -> float:
    return engine.tiers.costs.encode.unit_s or 0.0


def _save(engine: Engine) -> None:
    while engine.tend():
        pass
    engine.tiers.writer.drain(60.0)


def _place(engine: Engine, arm: str, rate: float) -> None:
    _save(engine)
    engine.tiers.costs.encode.unit_s = rate if arm == "chosen" else ALWAYS_LOAD_S
    for key in [entry.key for entry in engine.store if entry.is_snapshot]:
        engine.store.remove(key)
    if arm == "device":
        return
    engine.store.demote_all()
    if arm in ("disk", "chosen"):
        for tier in engine.tiers.tiers:
            for stored in tier.entries() if not tier.blocks else ():
                tier.remove(stored.key)
        for tier in engine.tiers.on_disk():
            _drop_from_page_cache(tier.folder)


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with suppress(OSError, AttributeError):  # a system without it reads from memory, and is faster than its disk
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _stored(engine: Engine) -> tuple[int, tuple[int, int]]:
    """Bytes of an entry on disk, and of how many transitions it keeps how many."""
    stored = [one for tier in engine.tiers.on_disk() for one in tier.entries()]
    return (stored[0].num_bytes, stored[0].num_kept_heads) if stored else (0, (0, 0))


def text(result: dict[str, Any]) -> str:
    rows = [
        (f"{r['num_segments']} x {r['segment_tokens']:,}",
         *(number(r[f"{arm}_ms_p50"]) for arm in SHOWN),
         f"{r['loaded_share']:.0%}", f"{r['entry_bytes'] / 1024:,.0f}",
         "{}/{}".format(*r["num_kept_heads"]), str(r["runs"]))
        for r in result["records"]
    ]  # fmt: skip
    return table(HEADS, rows)
