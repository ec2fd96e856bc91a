"""``python -m hypic_kernels.delta.bench``: layouts of lift, read, a layer, step, conv, run, on a GPU; JSON lines.

The layer of a large model: 16 key heads, 32 value heads of 128, bfloat16. ``warm`` is a request over 16 cached segments
(seams of 8 tokens and a tail of 128), ``long`` one row of 16,512 tokens, ``decode`` one token for each of some rows;
``layer`` (``bench_layer.py``) does all of a warm request but its convolution. A layout is compared with the reference
before it is timed, on the inputs that are timed, and not timed if it is wrong.
Building a layout takes some seconds. Times are per launch within a replayed graph that goes round several sets of
inputs, as layers of a model do. Bytes are the least there are: each input read once, each output written once.
``run`` is described in ``run_bench``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.delta import reference
from hypic_kernels.delta.check import EPSILON
from hypic_kernels.delta.layout import lift_candidates, read_candidates, step_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import PRECISIONS, SCAN_PRECISIONS, TOLERANCE, Maps, Precision
from hypic_kernels.timing import copy_bytes_per_s, replayed_s
from hypic_kernels.trust import relative_error

WARM = (8,) * 16 + (128,)
LONG = (16512,)


class Case(NamedTuple):
    """``num_sets`` sets of inputs, so that none is found in the cache."""

    name: str
    lengths: tuple[int, ...]
    size: int
    num_sets: int


CASES = (
    Case("warm", WARM, 16, 4),
    Case("warm", WARM, 32, 4),
    Case("long", LONG, 64, 1),
    Case("long", LONG, 32, 1),
)


@dataclass(frozen=True)
class Bench:
    """Sizes of the layer, what is timed, and how often."""

    num_k_heads: int = 16
    num_v_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    repeats: int = 20
    num_configs: int = 3
    precisions: tuple[Precision, ...] = ("bf16x3",)
    device: str = "cuda"

    def problem(self, lengths: tuple[int, ...], size: int, seed: int) -> Problem:
        heads = (self.num_k_heads, self.num_v_heads)
        shape = Shape(self.key_dim, self.value_dim, *heads, size, lengths, padding=0)
        return Problem.random(shape, dtype=torch.bfloat16, device=self.device, seed=seed)

    def timed(self, runs: Sequence[Callable[[], object]], error: Callable[[], float], limit: float) -> dict[str, Any]:
        """The error after the first run, and the time if it is small enough."""
        from triton.errors import TritonError

        try:
            runs[0]()
            found = error()
            if not found <= limit:
                return {"relative_error": found, "fault": f"wrong: more than {limit:.0e}; not timed"}
            return {"relative_error": found, "time_s": replayed_s(runs, self.repeats)}
        except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
            return {"fault": f"{type(fault).__name__}: {fault}"}

    def lifts(self, case: Case) -> Iterator[dict[str, Any]]:
        from hypic_kernels.delta import triton as kernel

        problems = [self.problem(case.lengths, case.size, seed) for seed in range(case.num_sets)]
        outs = [problem.poisoned() for problem in problems]
        exact = [tensor.float() for tensor in lifted(problems[0])]
        num_bytes = sum(tensor.nbytes for tensor in (*problems[0].tokens, *outs[0]))
        for precision in self.precisions:
            for config in lift_candidates(case.size, self.key_dim, self.value_dim)[: self.num_configs]:
                launches = [
                    kernel.lift(*p.tokens, p.chunks, p.rule, out, precision, config)
                    for p, out in zip(problems, outs, strict=True)
                ]
                for tensor in outs[0]:
                    tensor.fill_(torch.nan)
                result = self.timed(
                    [launch.run for launch in launches],
                    lambda: max(map(relative_error, outs[0], exact)),
                    TOLERANCE[precision],
                )
                yield row("lift", case, precision, config, num_bytes, result)

    def reads(self, case: Case) -> Iterator[dict[str, Any]]:
        from hypic_kernels.delta import reading as kernel

        work = [_ReadWork.of(self.problem(case.lengths, case.size, seed)) for seed in range(case.num_sets)]
        exact = work[0].exact()
        num_bytes = work[0].num_bytes
        for precision in self.precisions:
            for config in read_candidates(case.size, self.key_dim, self.value_dim, True)[: self.num_configs]:
                launches = [
                    kernel.read(
                        w.maps.query, w.maps.offset, w.states, w.problem.chunks, None, w.problem.norm, w.out, precision,
                        config,
                    )
                    for w in work
                ]  # fmt: skip
                work[0].out.fill_(torch.nan)
                limit = TOLERANCE[precision] + EPSILON[work[0].out.dtype]
                result = self.timed(
                    [launch.run for launch in launches], lambda: relative_error(work[0].out, exact), limit
                )
                yield row("read", case, precision, config, num_bytes, result)

    def steps(self, num_rows: int) -> Iterator[dict[str, Any]]:
        from hypic_kernels.delta import stepping as kernel

        case = Case("decode", (1,) * num_rows, 16, max(1, 256 // num_rows))
        problems = [self.problem(case.lengths, 16, seed) for seed in range(min(4, case.num_sets))]
        shape = (num_rows * case.num_sets, self.num_v_heads, self.key_dim, self.value_dim)
        pool = torch.randn(shape, device=self.device)
        all_slots = torch.randperm(shape[0], device=self.device).int().view(case.num_sets, num_rows)
        first, slots = problems[0], all_slots[0].contiguous()
        kept = pool[slots.long()]
        outputs, after = reference.step(*first.wide().tokens, pool.double(), slots, first.rule)
        outputs = reference.normed(outputs, first.wide().norm)
        for config in step_candidates(self.key_dim, self.value_dim)[: self.num_configs]:
            outs = [torch.full_like(first.v, torch.nan) for _ in problems]
            pool[slots.long()] = kept
            launches = []
            for number in range(case.num_sets):
                p, out = problems[number % len(problems)], outs[number % len(problems)]
                own = all_slots[number].contiguous()
                launches.append(kernel.step(*p.tokens, pool, own, own, p.rule, p.norm, out, config))

            def error(outs: list[Tensor] = outs) -> float:
                return max(relative_error(outs[0], outputs), relative_error(pool[slots.long()], after))

            result = self.timed([launch.run for launch in launches], error, 1e-5 + EPSILON[torch.bfloat16])
            yield row("step", case, "ieee", config, 2 * pool[: len(slots)].nbytes, result)


@dataclass(frozen=True)
class _ReadWork:
    problem: Problem
    maps: Maps
    states: Tensor
    out: Tensor

    @staticmethod
    def of(problem: Problem) -> _ReadWork:
        maps = Maps(*(tensor.float().contiguous() for tensor in lifted(problem)))
        return _ReadWork(problem, maps, torch.randn_like(maps.end_state), torch.empty_like(problem.v))

    @property
    def num_bytes(self) -> int:
        tensors = (self.maps.query, self.maps.offset, self.states, self.problem.norm.z, self.out)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def exact(self) -> Tensor:
        maps, chunks = self.maps, self.problem.chunks
        plain = reference.read(maps.query.double(), maps.offset.double(), self.states, chunks, None, len(self.out))
        return reference.normed(plain, self.problem.wide().norm).float()


def lifted(problem: Problem) -> Maps:
    """By the reference in float64, some hundred chunks at a time: all at once would not fit into memory."""
    wide, parts = problem.wide(), torch.split(problem.chunks, 64)
    maps = [reference.lift(*wide.tokens, part, wide.rule) for part in parts]
    return Maps(*(torch.cat([part.float() for part in tensors]) for tensors in zip(*maps, strict=True)))


def row(name: str, case: Case, precision: str, config: Any, num_bytes: int, result: dict[str, Any]) -> dict[str, Any]:
    measured = {"bytes_per_s": num_bytes / result["time_s"]} if "time_s" in result else {}
    about = {"case": case.name, "num_tokens": sum(case.lengths), "chunk": case.size, "precision": precision}
    return {"name": name, **about, "config": config._asdict(), "bytes": num_bytes, **result, **measured}


def _rows(bench: Bench, names: Sequence[str], num_rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    for case in CASES:
        if "lift" in names:
            yield from bench.lifts(case)
        if "read" in names:
            yield from bench.reads(case)
        torch.cuda.empty_cache()
    if "layer" in names:
        from hypic_kernels.delta import bench_layer as layer

        problems = [bench.problem(layer.LENGTHS, 16, seed) for seed in range(4)]
        yield from layer.rows(problems, bench.repeats, SCAN_PRECISIONS[1:], bench.num_configs)
        torch.cuda.empty_cache()
    if "step" in names:
        for count in num_rows:
            yield from bench.steps(count)
    if "conv" in names:
        from hypic_kernels.conv.bench import rows

        for lengths in (WARM, LONG, (1,) * 64):
            yield from rows(lengths, 2 * bench.num_k_heads * bench.key_dim + bench.num_v_heads * bench.value_dim)
    if "run" in names:
        from hypic_kernels.delta import run_bench

        heads, dims = (bench.num_k_heads, bench.num_v_heads), (bench.key_dim, bench.value_dim)
        yield from run_bench.rows(heads, dims, bench.repeats)


def main(words: Sequence[str]) -> int:
    names = ("lift", "read", "layer", "step", "conv", "run")
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.delta.bench", description=__doc__)
    parser.add_argument("--only", choices=names, action="append", help="all, unless given")
    parser.add_argument("--rows", type=int, action="append", help="of decode; 1, 16 and 64 unless given")
    parser.add_argument("--configs", type=int, default=3, help="layouts of each kind that are built and timed")
    parser.add_argument(
        "--precision", choices=PRECISIONS, action="append", help="of lift and read; bf16x3 unless given"
    )
    parser.add_argument("--best", action="store_true", help="the fastest layout of each kind only, and faults")
    given = parser.parse_args(words)
    if not available() or interpreted():
        print("this bench needs a CUDA device and Triton, with TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    import triton

    torch.backends.cuda.matmul.allow_tf32 = False
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**about, "copy_bytes_per_s": copy_bytes_per_s(10)}), flush=True)
    best: dict[tuple[object, ...], dict[str, Any]] = {}
    bench = Bench(num_configs=given.configs, precisions=tuple(given.precision or Bench.precisions))
    for result in _rows(bench, given.only or names, given.rows or (1, 16, 64)):
        if not given.best or "time_s" not in result or "config" not in result:
            print(json.dumps(result), flush=True)
            continue
        kind = tuple(result.get(name) for name in ("name", "case", "num_tokens", "chunk", "precision", "way"))
        if kind not in best or result["time_s"] < best[kind]["time_s"]:
            best[kind] = result
    for result in best.values():
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
