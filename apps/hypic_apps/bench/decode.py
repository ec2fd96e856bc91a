"""``hypic bench decode``: a step of one token for each of so many requests, beside what the bandwidth allows.

Every request has a context of its own, made up of random numbers (``driving``), so that nothing is prefilled and no
request's K and V lie in a cache because another request reads them too.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.engine.task import Task
from hypic_apps.bench import driving, floors, profile
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_common, is_small, note, numbers, shown, with_defaults
from hypic_apps.bench.records import about, device_of_settings, number, percentile, table, write
from hypic_apps.bench.session import Session, session
from hypic_apps.cli.errors import CommandError
from hypic_apps.cli.options import engine_settings
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "decode steps beside the bandwidth limit"
EXAMPLES = """
hypic bench decode
hypic bench decode --geometry qwen3.5-35b-a3b --batch 1,16,64 --context 16384
hypic bench decode --geometry qwen3.5-4b --batch 1,16 --deterministic
"""
DETAILS = """Contexts are made up, so that no prefill is needed: one token a request and step
is measured, against the bytes that a step must read and write. --deterministic
measures each batch both ways: deterministic requests never share a step."""
HEADS = ("batch", "context", "step ms", "p90", "tokens/s", "bandwidth floor ms", "of the limit", "steps",
         "deterministic ms", "x plain")  # fmt: skip
TAIL_TOKENS = 8
PROFILED_TOKENS = 5
MOST_ALONE = 2


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "decode", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64], metavar="N,N",
                        help="requests at a time (default: 1,16,64)")  # fmt: skip
    parser.add_argument("--context", type=numbers, metavar="N,N",
                        help="tokens of context (default: 16384; small models 1024)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=32, metavar="N", help="steps measured (default: 32)")
    parser.add_argument("--warmup", type=positive, default=4, metavar="N", help="steps not counted (default: 4)")
    parser.add_argument("--profile", metavar="FILE", help="write where the time of a few steps of each batch goes")
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    made, settings = geometry(args.geometry), engine_settings(args)
    device = device_of_settings(settings)
    limits = floors.measure(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    contexts = args.context or [1024 if is_small(device, made) else 16384]
    longest = max(contexts) + TAIL_TOKENS + args.steps + args.warmup + 16
    # A context is as long as a segment would have to be for this split of memory.
    settings = with_defaults(settings, max_running=max(args.batch), max_context=longest, typical_segment_tokens=longest)
    both = settings.pop("deterministic", False)
    note(f"building {made.name} on {device}")
    with session(made, settings, ids=True, seed=settings.get("seed", 0)) as built:
        records = [
            measure(built, batch, context, args.steps, args.warmup, limits)
            | (measure_alone(built, batch, context, args.steps, args.warmup) if both else {})
            | {"geometry": made.name}
            for context in contexts for batch in args.batch
        ]  # fmt: skip
        code = shown(args, {**about("decode steps, beside the bandwidth limit"), "records": records}, text)
        if args.profile:
            write(Path(args.profile), "\n".join(_profile(built, batch, contexts[0], limits) for batch in args.batch))
    return code


def measure(built: Session, batch: int, context: int, steps: int, warmup: int, limits: floors.Limits) -> dict[str, Any]:
    """One batch size. The step's floor counts weights, K and V of every context, states read and written.

    Raises:
        CommandError: requests were preempted, or did not all run in the same steps.
        StoreFull: memory does not hold so many contexts.
    """
    note(f"batch {batch}, context {context}")
    built.forget()
    taken = built.call(lambda engine: _steps(engine, built, batch, context, steps + warmup + 1))
    together = [step.seconds for step in taken if step.num_tokens == batch][1 + warmup :]
    if len(together) < steps:
        raise CommandError(f"{batch} requests did not decode together for {steps} steps; raise --memory.")
    counts = floors.Counts.of(built.runner.model)
    load = floors.decode_load(batch, context, counts.layout)
    bandwidth_s = (counts.weight_bytes(batch) + load.read_bytes) / limits.copy_bytes
    p50 = percentile(together, 50)
    return {
        "device": str(built.device),
        "batch": batch,
        "context": context,
        "step_ms_p50": 1e3 * p50,
        "step_ms_p90": 1e3 * percentile(together, 90),
        "tokens_per_s": batch / p50,
        "bandwidth_floor_ms": 1e3 * bandwidth_s,
        "floor_ms": 1e3 * load.seconds(counts, limits),
        "bandwidth_share": bandwidth_s / p50,
        "steps": len(together),
    }


def measure_alone(built: Session, batch: int, context: int, steps: int, warmup: int) -> dict[str, Any]:
    """What a token for each of ``batch`` deterministic requests takes: as many steps as there are requests. Only the
    first ``MOST_ALONE`` are run, since each is prefilled for real: deterministic requests begin from nothing.

    Raises:
        CommandError: two of them got a token in one step.
    """
    note(f"batch {batch}, context {context}, deterministic")
    built.forget()
    many, each = min(batch, MOST_ALONE), steps + warmup + 1
    taken = built.call(lambda engine: driving.drive(engine, _deterministic(built, many, context, each)))
    answering = [step for step in taken if step.num_tokens]
    if len(answering) != many * each:
        raise CommandError("deterministic requests shared a step; this is a fault of hypic.")
    alone = [step.seconds for place, step in enumerate(answering) if place % each > warmup]
    return {
        "deterministic_ms_p50": 1e3 * batch * percentile(alone, 50),
        "deterministic_ms_p90": 1e3 * batch * percentile(alone, 90),
        "deterministic_requests_run": many,
    }


def _deterministic(built: Session, many: int, context: int, max_tokens: int) -> list[Task]:
    policy = built.policy.with_(deterministic=True)
    prompts = [_drawn(built.runner, f"alone {place} {context}", context) for place in range(many)]
    return driving.answer_tasks(prompts, policy, max_tokens, "alone")


def _drawn(runner: Runner, salt: str, context: int) -> list[Piece]:
    """A context of random tokens and a short tail."""
    draw, vocab_size = random.Random(salt), int(runner.model.embed_tokens.num_embeddings)  # type: ignore[attr-defined]
    head, tail = (tuple(draw.choices(range(vocab_size), k=k)) for k in (context, TAIL_TOKENS))
    return [Piece(head, ends_message=True), Piece(tail)]


def _steps(engine: Engine, built: Session, batch: int, context: int, max_tokens: int) -> list[driving.Step]:
    return driving.drive(engine, _made_up(engine, built, batch, context, max_tokens))


def _made_up(engine: Engine, built: Session, batch: int, context: int, max_tokens: int, salt: str = "") -> list[Task]:
    """Requests whose contexts have been made up."""
    policy = built.policy.with_(reuse="segments")
    prompts = [_drawn(engine.runner, f"decode {place} {context}{salt}", context) for place in range(batch)]
    for place, pieces in enumerate(prompts):
        driving.make_up_context(engine, pieces, policy, seed=place)
    return driving.answer_tasks(prompts, policy, max_tokens, f"decode{salt}")


def _profile(built: Session, batch: int, context: int, limits: floors.Limits) -> str:
    """Tables of one short prefill and the steps after it, driven on the engine's own thread."""
    note(f"profiling batch {batch}")

    def requests() -> Iterator[Callable[[Engine], object]]:
        for repeat in itertools.count():
            built.forget()
            tasks = built.call(partial(_made_up, built=built, batch=batch, context=context,
                                       max_tokens=PROFILED_TOKENS, salt=f" {repeat}"))  # fmt: skip
            built.synchronize()
            yield partial(_driven, tasks)

    counts = floors.Counts.of(built.runner.model)
    load = floors.decode_load(batch, context, counts.layout)
    head = f"batch {batch}, context {context}: {TAIL_TOKENS} tokens each, then {PROFILED_TOKENS - 1} steps\n"
    head += f"of one step, {floors.rooms_text(load, counts, limits)}"
    return f"{head}\n{profile.take(requests(), built.call, built.device)}"


def _driven(tasks: Sequence[Task], engine: Engine) -> None:
    driving.drive(engine, tasks)


def _cost(alone_ms: float | None, plain_ms: float) -> tuple[str, str]:
    """Of determinism, in milliseconds and as a ratio."""
    return number(alone_ms), number(None if alone_ms is None else alone_ms / plain_ms)


def text(result: dict[str, Any]) -> str:
    rows = [
        (str(r["batch"]), f"{r['context']:,}", number(r["step_ms_p50"]), number(r["step_ms_p90"]),
         number(r["tokens_per_s"]), number(r["bandwidth_floor_ms"]), f"{r['bandwidth_share']:.0%}", str(r["steps"]),
         *_cost(r.get("deterministic_ms_p50"), r["step_ms_p50"]))
        for r in result["records"]
    ]  # fmt: skip
    return table(HEADS, rows)
