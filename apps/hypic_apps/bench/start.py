"""``hypic bench start``: from starting Python to ready and to a first token, with an empty and a filled kernel cache.

Each measurement is a process of its own. Both use one folder for compiled kernels, empty at first. What appears in it
after the engine is ready was compiled on a request's path, which should be nothing; so should be what the engine's
thread uses for the first time then, compiled or found in the folder. Requests of several shapes, alone and together,
look for that. On a machine without a GPU there is nothing to compile, and both runs are alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypic_apps.bench import driving
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_common, is_small, note, numbers, shown, with_defaults
from hypic_apps.bench.prompts import Shape
from hypic_apps.bench.records import about, device_of_settings, number, table
from hypic_apps.bench.session import Session, session
from hypic_apps.bench.ttft import Repetition
from hypic_apps.cli.errors import CommandError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command

SUMMARY = "time from start to ready and to the first token"
EXAMPLES = """
hypic bench start
hypic bench start --geometry qwen3.5-4b --segments 4,16
"""
DETAILS = """Two new processes, the second with the kernels that the first has compiled. Says
what was compiled on a request's path after the engine was ready."""
HEADS = ("kernel cache", "import s", "ready s", "first token s", "compiled before ready", "on a request's path",
         "first used there")  # fmt: skip
# Beside the shapes asked for: lengths that are multiples of nothing, and one segment alone.
ODD = (Shape(3, 517, 45), Shape(1, 77, 7))
NUM_TOGETHER = 4
START = """
import os, sys
os.environ["TRITON_CACHE_DIR"] = {kernels!r}
sys.path[:0] = {path!r}
from hypic_apps.bench.start import child
child()
"""


@dataclass(frozen=True)
class Ask:
    """What the new process does; ``started_s`` is the time of day at which it was started."""

    geometry: str
    settings: Mapping[str, Any]
    shapes: Sequence[Mapping[str, int]]
    kernels: str
    started_s: float


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "start", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--segments", type=numbers, default=[4, 16], metavar="N,N",
                        help="segments of the prompts asked (default: 4,16)")  # fmt: skip
    parser.add_argument("--segment-tokens", type=numbers, metavar="N,N", help="(default: 1024; small models 128)")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Raises:
        CommandError: a process failed.
    """
    made, settings = geometry(args.geometry), engine_settings(args)
    lengths = args.segment_tokens or [128 if is_small(device_of_settings(settings), made) else 1024]
    shapes = [Shape(many, length, 32) for many in args.segments for length in lengths]
    settings = with_defaults(settings, max_running=8, max_context=max(s.num_tokens for s in shapes) + 512)
    records = []
    with tempfile.TemporaryDirectory(prefix="hypic-kernels-") as folder:
        for state in ("empty", "filled"):
            note(f"starting {args.geometry}, kernel cache {state}")
            asked = Ask(args.geometry, settings, [asdict(shape) for shape in shapes], folder, 0.0)
            records.append({"geometry": made.name, "kernel_cache": state, **_measured(asked)})
    return shown(args, {**about("seconds from start to ready and to the first token"), "records": records}, text)


def _measured(asked: Ask) -> dict[str, Any]:
    command = [sys.executable, "-c", START.format(path=sys.path, kernels=asked.kernels)]
    given = asdict(asked) | {"started_s": time.time()}
    done = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise CommandError(f"the process that was started ended with exit code {done.returncode}; see above.")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def child() -> None:
    """The new process's side: builds, asks, and prints what it saw."""
    print(json.dumps(measure(Ask(**json.load(sys.stdin)))))


def measure(asked: Ask) -> dict[str, Any]:
    """Seconds since the process was started, and numbers of compiled kernels."""
    imported_s = time.time() - asked.started_s
    shapes = [Shape(**shape) for shape in asked.shapes]
    folder = Path(asked.kernels)
    before = _kernels(folder)
    with session(geometry(asked.geometry), asked.settings, ids=True) as built:
        ready_s, ready = time.time() - asked.started_s, _kernels(folder)
        first = Repetition(built, shapes[0], 0).measure("cold")
        first_s = time.time() - asked.started_s
        for shape in (*shapes, *(odd for odd in ODD if odd.num_tokens < built.runner.max_context - 8)):
            for arm in ("full", "prefix", "cold", "warm"):
                Repetition(built, shape, 1).measure(arm, max_tokens=4)
            _together(built, shape)
        late = built.loop.compiled
        return {
            "device": str(built.device),
            "import_s": imported_s,
            "ready_s": ready_s,
            "first_token_s": first_s,
            "first_ttft_ms": 1e3 * first.ttft_s,
            "compiled_before_ready": ready - before,
            "compiled_on_requests": _kernels(folder) - ready,
            "first_used_on_requests": [] if late is None else list(late.names),
        }


def _together(built: Session, shape: Shape) -> None:
    """Requests in the same steps: some ask segments that are cached, others some that are not."""
    documents: list[Sequence[Any]] = [built.source.documents(shape, 2 + n // 2) for n in range(NUM_TOGETHER)]
    prompts = [built.source.prompt(shape, found, f"together {n}")() for n, found in enumerate(documents)]
    tasks = driving.answer_tasks(prompts, built.policy.with_(reuse="segments"), 4, f"together-{shape}")
    built.call(lambda engine: driving.drive(engine, tasks))


def _kernels(folder: Path) -> int:
    """Compiled kernels in Triton's cache: one folder each."""
    return sum(entry.is_dir() for entry in folder.iterdir()) if folder.is_dir() else 0


def text(result: dict[str, Any]) -> str:
    rows = [
        (r["kernel_cache"], number(r["import_s"]), number(r["ready_s"]), number(r["first_token_s"]),
         str(r["compiled_before_ready"]), str(r["compiled_on_requests"]), str(len(r["first_used_on_requests"])))
        for r in result["records"]
    ]  # fmt: skip
    late = sorted({name for r in result["records"] for name in r["first_used_on_requests"]})
    return "\n".join([table(HEADS, rows), *(f"used for the first time by a request: {name}" for name in late)])
