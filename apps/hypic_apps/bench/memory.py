"""``hypic bench memory``: what one more concurrent request costs that shares all its segments with others.

Of the pool: pages of its own rows and a state. Beside the pool, on a GPU: the peak of a step's working memory, which
would grow by the prompt's K and V if cached pages were copied for every request.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic_apps.bench import driving
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_common, is_small, note, numbers, shown, with_defaults
from hypic_apps.bench.prompts import Shape, shuffled
from hypic_apps.bench.records import about, device_of_settings, table
from hypic_apps.bench.session import Session, session
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "memory of one more request that shares its segments"
EXAMPLES = """
hypic bench memory
hypic bench memory --geometry qwen3.5-35b-a3b --batch 1,8,16
"""
DETAILS = """Requests ask the same segments in different orders at the same time. Each should
take a state and the pages of its own rows, and no copy of cached K and V."""
HEADS = ("requests", "pool MiB", "peak MiB beside it")
MIB = 2**20


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "memory", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--batch", type=numbers, default=[1, 2, 4, 8], metavar="N,N",
                        help="requests at a time (default: 1,2,4,8)")  # fmt: skip
    parser.add_argument("--segments", type=positive, default=16, metavar="N", help="of a prompt (default: 16)")
    parser.add_argument("--segment-tokens", type=positive, metavar="N", help="(default: 1024; small models 128)")
    parser.add_argument("--tail-tokens", type=positive, default=32, metavar="N", help="(default: 32)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    made, settings = geometry(args.geometry), engine_settings(args)
    device = device_of_settings(settings)
    length = args.segment_tokens or (128 if is_small(device, made) else 1024)
    shape = Shape(args.segments, length, args.tail_tokens)
    settings = with_defaults(settings, max_running=max(args.batch), max_context=shape.num_tokens + 1024)
    note(f"building {made.name} on {device}")
    with session(made, settings, ids=True, seed=settings.get("seed", 0)) as built:
        record = measure(built, shape, sorted(args.batch)) | {"geometry": made.name}
    return shown(args, {**about("memory of one more request that shares its segments"), "records": [record]}, text)


def measure(built: Session, shape: Shape, batches: Sequence[int]) -> dict[str, Any]:
    """Bytes by number of requests, and the growth from the fewest to the most, by request."""
    documents: Sequence[Any] = built.source.documents(shape, 0)
    policy = built.policy.with_(reuse="segments")
    built.encode([built.source.segment(document) for document in documents], policy)
    found = []
    for batch in batches:
        orders = [shuffled(documents, place) for place in range(batch)]
        prompts = [
            built.source.prompt(shape, [documents[i] for i in order], f"{batch} {place}")()
            for place, order in enumerate(orders)
        ]
        _measured(built, prompts)  # compiles what is compiled
        found.append((batch, *_measured(built, prompts)))
    layout, pool = built.runner.pool.layout, built.runner.pool
    rows = shape.num_segments * (shape.segment_tokens - policy.num_cached(shape.segment_tokens)) + shape.tail_tokens
    return {
        "device": str(built.device),
        "num_segments": shape.num_segments,
        "segment_tokens": shape.segment_tokens,
        "requests": [batch for batch, _, _ in found],
        "pool_bytes": [used for _, used, _ in found],
        "peak_bytes": [peak for _, _, peak in found],
        "pool_bytes_per_request": _growth([(batch, used) for batch, used, _ in found]),
        "peak_bytes_per_request": _growth([(batch, peak) for batch, _, peak in found]),
        "state_bytes": layout.state_bytes,
        "row_page_bytes": pool.pages_for(rows + 1) * pool.page_bytes,
        "cached_kv_bytes": shape.num_segments * shape.segment_tokens * layout.token_bytes,
    }


def _measured(built: Session, prompts: Sequence[Sequence[Piece]]) -> tuple[int, int | None]:
    """Bytes of the pool that these requests held at most at a time beyond what was held, and the peak beside it."""
    policy = built.policy.with_(reuse="segments")
    tasks = driving.answer_tasks(prompts, policy, 3, "memory")

    def run(engine: Engine) -> tuple[int, int | None]:
        for key in [entry.key for entry in engine.store if entry.is_snapshot]:
            engine.store.remove(key)
        before, on_gpu = driving.used_bytes(engine), built.device.type == "cuda"
        most: list[int] = []
        if on_gpu:
            torch.cuda.synchronize(built.device)
            torch.cuda.reset_peak_memory_stats(built.device)
            resident = torch.cuda.memory_allocated(built.device)
        driving.drive(engine, tasks, lambda engine: most.append(_running_bytes(engine, before, len(tasks))))
        peak = torch.cuda.max_memory_allocated(built.device) - resident if on_gpu else None
        return max(most), peak

    return built.call(run)


def _running_bytes(engine: Engine, before: int, num_tasks: int) -> int:
    """What is taken while all requests run; nothing once the first has ended and left a snapshot."""
    return driving.used_bytes(engine) - before if len(engine.scheduler.running) == num_tasks else 0


def _growth(found: Sequence[tuple[int, int | None]]) -> float | None:
    """Bytes a request, from the fewest to the most."""
    (fewest, low), (most, high) = found[0], found[-1]
    return None if low is None or high is None or most == fewest else (high - low) / (most - fewest)


def text(result: dict[str, Any]) -> str:
    (record,) = result["records"]
    peaks = ["-" if peak is None else f"{peak / MIB:,.2f}" for peak in record["peak_bytes"]]
    rows = [
        (str(batch), f"{used / MIB:,.2f}", peak)
        for batch, used, peak in zip(record["requests"], record["pool_bytes"], peaks, strict=True)
    ]
    pool, peak = record["pool_bytes_per_request"], record["peak_bytes_per_request"]
    lines = [table(HEADS, rows), ""]
    if pool is not None:
        lines.append(f"one more request: {pool / MIB:,.2f} MiB of the pool; a state is "
                     f"{record['state_bytes'] / MIB:,.2f} MiB, the pages of its rows "
                     f"{record['row_page_bytes'] / MIB:,.2f} MiB")  # fmt: skip
    beside = "not measured without a GPU" if peak is None else f"{peak / MIB:,.2f} MiB beside the pool"
    lines.append(f"{beside}; K and V of the cached segments: {record['cached_kv_bytes'] / MIB:,.2f} MiB")
    return "\n".join(lines)
