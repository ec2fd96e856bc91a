"""``python -m hypic_kernels.decay.bench``: every layout of lift, read and step on one GPU; JSON lines to stdout.

The layer of a model of 16 billion parameters: 16 heads of 128, half of each rotated, norms of q and k, bfloat16.
``warm`` is a request over 16 cached segments (seams of 8 tokens and a tail of 128), ``long`` one row of 16,512 tokens,
``decode`` one token for each of some rows. A layout is compared with the reference before it is timed, and not timed if
it is wrong. Times are per launch within a replayed graph that goes round several sets of inputs, as layers do. Bytes
are the least there are: each input read once, each output written once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.decay.check import Kind, LiftVariant, ReadVariant, StepVariant
from hypic_kernels.decay.layout import lift_candidates, read_candidates, step_candidates
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.decay.rule import PRECISIONS, Precision
from hypic_kernels.launch import Launch
from hypic_kernels.timing import copy_bytes_per_s, replayed_s

NUM_HEADS, HEAD_DIM, NUM_TURNED = 16, 128, 32


class Case(NamedTuple):
    """``num_sets`` sets of inputs, so that none is found in the cache."""

    name: str
    lengths: tuple[int, ...]
    size: int
    num_sets: int


CASES = (
    Case("warm", (8,) * 16 + (128,), 16, 4),
    Case("long", (16512,), 64, 1),
)


def problems(case: Case, device: str) -> list[Problem]:
    shape = Shape(HEAD_DIM, HEAD_DIM, NUM_HEADS, NUM_HEADS, case.size, case.lengths, padding=0, num_turned=NUM_TURNED)
    return [Problem.random(shape, dtype=torch.bfloat16, device=device, seed=seed) for seed in range(case.num_sets)]


def chunked(case: Case, precision: Precision, repeats: int, device: str) -> Iterator[dict[str, Any]]:
    """Rows of ``lift`` and ``read``."""
    from hypic_kernels.decay import triton as kernel

    sets = problems(case, device)
    kind = Kind.of(sets[0].k, sets[0].v, sets[0].rule)
    maps, outs = [p.poisoned() for p in sets], [torch.empty_like(p.v, dtype=torch.float32) for p in sets]
    read_bytes = _bytes(sets[0].q, sets[0].k, sets[0].v, maps[0].end_state, outs[0])
    for config in lift_candidates(case.size, HEAD_DIM, HEAD_DIM):
        launches = [
            kernel.lift(p.k, p.v, p.g, p.chunks, p.rule, out, precision, config)
            for p, out in zip(sets, maps, strict=True)
        ]
        result = timed(launches, LiftVariant(kind, case.size, precision, config), repeats)
        yield row("lift", case, precision, config, _bytes(sets[0].k, sets[0].v, *maps[0]), result)
    for layout in read_candidates(case.size, HEAD_DIM, HEAD_DIM):
        launches = [
            kernel.read(*p.tokens, p.states, p.chunks, p.rule, out, precision, layout)
            for p, out in zip(sets, outs, strict=True)
        ]
        result = timed(launches, ReadVariant(kind, torch.float32, case.size, precision, layout), repeats)
        yield row("read", case, precision, layout, read_bytes, result)


def steps(num_rows: int, repeats: int, device: str) -> Iterator[dict[str, Any]]:
    from hypic_kernels.decay import stepping as kernel

    case = Case("decode", (1,) * num_rows, 16, max(1, 256 // num_rows))
    p = problems(case._replace(num_sets=1), device)[0]
    kind = Kind.of(p.k, p.v, p.rule)
    pool = torch.randn((num_rows * case.num_sets, NUM_HEADS, HEAD_DIM, HEAD_DIM), device=device)
    slots = torch.randperm(len(pool), device=device).int().view(case.num_sets, num_rows)
    out = torch.empty_like(p.v, dtype=torch.float32)
    for config in step_candidates(HEAD_DIM, HEAD_DIM):
        launches = [kernel.step(*p.tokens, pool, own, own, p.rule, out, config) for own in slots]
        result = timed(launches, StepVariant(kind, torch.float32, torch.float32, config), repeats)
        yield row("step", case, "ieee", config, 2 * pool[:num_rows].nbytes, result)


def timed(launches: Sequence[Launch], variant: LiftVariant | ReadVariant | StepVariant, repeats: int) -> dict[str, Any]:
    """The error on the problem of the self-check, and the time if it is small enough."""
    from triton.errors import TritonError

    try:
        found = variant.measure()
        if not found <= variant.tolerance:
            return {"relative_error": found, "fault": f"wrong: more than {variant.tolerance:.0e}; not timed"}
        runs: list[Callable[[], object]] = [launch.run for launch in launches]
        return {"relative_error": found, "time_s": replayed_s(runs, repeats)}
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}


def row(name: str, case: Case, precision: str, config: Any, num_bytes: int, result: dict[str, Any]) -> dict[str, Any]:
    measured = {"bytes_per_s": num_bytes / result["time_s"]} if "time_s" in result else {}
    about = {"case": case.name, "num_tokens": sum(case.lengths), "chunk": case.size, "precision": precision}
    return {"name": name, **about, "config": config._asdict(), "bytes": num_bytes, **result, **measured}


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.decay.bench", description=__doc__)
    parser.add_argument("--rows", type=int, action="append", help="of decode; 1, 16 and 64 unless given")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16x3", help="of lift and read")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(words)
    if not available() or interpreted():
        print("this bench needs a CUDA device and Triton, with TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**about, "copy_bytes_per_s": copy_bytes_per_s(10)}), flush=True)
    for case in CASES:
        for result in chunked(case, given.precision, given.repeats, "cuda"):
            print(json.dumps(result), flush=True)
    for num_rows in given.rows or (1, 16, 64):
        for result in steps(num_rows, given.repeats, "cuda"):
            print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
