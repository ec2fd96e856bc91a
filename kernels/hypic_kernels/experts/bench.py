"""``python -m hypic_kernels.experts.bench``: products of a layer's experts on one GPU; JSON lines to stdout.

The layer of a large model: 256 experts, 8 a token, 2048 channels, experts of 512, bfloat16; each token's experts are
drawn at random, and anew in every set of inputs, so that no set finds its matrices in the cache. A layout is compared
with the reference on the inputs that are timed, and not timed if it is wrong. ``grouped`` is torch's grouped product
with a gate behind it; ``scatter`` goes before that one, ``order`` before ours. Times are per call within a replayed
graph. Bytes are those of the matrices of experts that have rows, read once, and of rows in and out. Experts of few
tokens (``--only few``) are ``bench_few.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels import available, interpreted
from hypic_kernels.experts import Layout, bench_few, choose, products, reference
from hypic_kernels.experts import triton as kernel
from hypic_kernels.experts.layout import Config, Kind
from hypic_kernels.pointwise import silu_mul
from hypic_kernels.timing import copy_bytes_per_s, replayed_s
from hypic_kernels.trust import relative_error

CASES = {
    "warm": 256, "warm 512": 512, "decode 1": 1, "decode 16": 16, "decode 64": 64, "full 8192": 8192,
    "full 16384": 16384,
}  # fmt: skip
MANY_TOKENS = 1024
LIMIT = 2.0**-8


def candidates(num_rows: int, num_experts: int, kind: Kind) -> list[Layout]:
    """The chosen one and its neighbours, narrow and wide, deep and shallow; ``block_n`` as of an ungated product."""
    chosen = choose(num_rows, num_experts, kind, torch.bfloat16)
    sizes: tuple[tuple[int, ...], ...] = (
        *((16, 64, 128, 4, 4), (32, 64, 128, 3, 4), (32, 64, 128, 4, 4), (16, 64, 64, 6, 4)),
        *((16, 128, 64, 4, 4), (64, 64, 64, 4, 4)),
    )
    if chosen.by_row:
        sizes = ((16, 32, 128, 4, 4), (16, 32, 256, 3, 4), (16, 64, 128, 4, 4))
    if num_rows > 64 * num_experts:
        sizes = (
            *((128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (128, 128, 64, 4, 8), (128, 128, 64, 3, 4)),
            *((128, 128, 128, 3, 8), (64, 256, 64, 4, 8), (64, 256, 64, 3, 4), (64, 128, 64, 4, 4)),
        )
    halves = 2 if kind == "silu" else 1
    configs = [Config(m, n // halves, k, stages, warps) for m, n, k, stages, warps in sizes]
    return list(dict.fromkeys([chosen, *(Layout(config, chosen.by_row) for config in configs)]))


@dataclass(frozen=True)
class Layer:
    """``into [E, 2 I, K]`` and ``back [E, K, I]``."""

    into: Tensor
    back: Tensor
    top_k: int
    repeats: int

    @classmethod
    def random(cls, num_experts: int, top_k: int, width: int, inner: int, repeats: int) -> Layer:
        shapes = (num_experts, 2 * inner, width), (num_experts, width, inner)
        into, back = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.03) for shape in shapes)
        return cls(into, back, top_k, repeats)

    def work(self, num_tokens: int, seed: int) -> _Work:
        generator = torch.Generator("cuda").manual_seed(seed)
        num_experts, width, inner = self.back.shape
        scores = torch.rand(num_tokens, num_experts, generator=generator, device="cuda")
        chosen = scores.topk(self.top_k).indices.to(torch.int32)
        tokens, _, ends = reference.order(chosen, num_experts)
        x, hidden = (
            torch.randn(num, size, generator=generator, device="cuda").bfloat16()
            for num, size in ((num_tokens, width), (chosen.numel(), inner))
        )
        return _Work(self, x, hidden, chosen, tokens.contiguous(), ends)


@dataclass(frozen=True)
class _Work:
    """A set of inputs: ``x [N, K]`` of tokens, ``hidden [N k, I]`` of rows."""

    layer: Layer
    x: Tensor
    hidden: Tensor
    chosen: Tensor
    tokens: Tensor
    ends: Tensor

    def multiply(self, kind: Kind, layout: Layout) -> tuple[Callable[[], None], Tensor]:
        if kind == "silu":
            out = torch.full_like(self.hidden, torch.nan)
            return products.multiply(self.x, self.layer.into, self.ends, self.tokens, kind, out, layout).run, out
        out = torch.full((len(self.hidden), self.x.shape[1]), torch.nan, device="cuda", dtype=self.x.dtype)
        return products.multiply(self.hidden, self.layer.back, self.ends, None, kind, out, layout).run, out

    def exact(self, kind: Kind) -> Tensor:
        """In float32: the reference would round."""
        if kind == "silu":
            return reference.gate_up(self.x.float(), self.layer.into, self.ends, self.tokens, True)
        return reference.down(self.hidden.float(), self.layer.back, self.ends)

    def num_bytes(self, kind: Kind) -> int:
        counts = self.ends.diff(prepend=self.ends.new_zeros(1))
        weight = self.layer.into if kind == "silu" else self.layer.back
        moved = (self.x, self.hidden) if kind == "silu" else (self.hidden, self.x.expand(self.layer.top_k, -1, -1))
        rows = sum(tensor.numel() * tensor.element_size() for tensor in moved)
        return int((counts > 0).sum()) * weight[0].nbytes + rows

    def grouped(self, kind: Kind) -> Callable[[], object]:
        product: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
        if kind == "none":
            return lambda: product(self.hidden, self.layer.back.mT, offs=self.ends)
        rows = self.x[self.tokens.long()]
        return lambda: silu_mul(*product(rows, self.layer.into.mT, offs=self.ends).chunk(2, dim=-1))

    def before(self, name: str) -> list[Callable[[], object]]:
        """What is done to the rows before a product, ``order`` or ``scatter``."""
        tokens, places, ends = (torch.empty_like(each) for each in (self.tokens, self.chosen, self.ends))
        if name == "order":
            return [launch.run for launch in kernel.order(self.chosen, tokens, places, ends)]
        rows, counts = self.x.new_empty((len(tokens), self.x.shape[1])), torch.zeros_like(ends)
        launches = kernel.scatter(self.x, self.chosen, rows, places, counts, ends)
        return [counts.zero_, *(launch.run for launch in launches)]


def rows(layer: Layer, name: str, num_tokens: int) -> Iterator[dict[str, Any]]:
    num_sets = 2 if num_tokens > MANY_TOKENS else 4 if num_tokens > 64 else 8
    work = [layer.work(num_tokens, seed) for seed in range(num_sets)]
    num_rows, num_experts = num_tokens * layer.top_k, len(layer.into)
    for kind in ("silu", "none"):
        about = {"case": name, "num_rows": num_rows, "bytes": sum(w.num_bytes(kind) for w in work) // len(work)}
        about["name"] = "gate_up" if kind == "silu" else "down"
        about["flop"] = 2 * num_rows * (layer.into if kind == "silu" else layer.back)[0].numel()
        exact, chosen = work[0].exact(kind), choose(num_rows, num_experts, kind, torch.bfloat16)
        for layout in candidates(num_rows, num_experts, kind):
            found = _checked(layer, work, exact, kind, layout)
            yield _rated({**about, "config": layout.config._asdict(), "chosen": layout == chosen, **found})
        yield _rated({**about, "config": "grouped", "time_s": _timed(layer, [w.grouped(kind) for w in work])})
    for before in ("order", "scatter"):
        steps = [w.before(before) for w in work]
        time_s = _timed(layer, [step for each in steps for step in each]) * len(steps[0])
        yield {"case": name, "num_rows": num_rows, "name": before, "time_s": time_s}


def _checked(layer: Layer, work: Sequence[_Work], exact: Tensor, kind: Kind, layout: Layout) -> dict[str, Any]:
    """The error on the first set, and the time if it is small enough."""
    from triton.errors import TritonError

    made = [each.multiply(kind, layout) for each in work]
    try:
        made[0][0]()
        error = relative_error(made[0][1], exact)
        if not error <= LIMIT:
            return {"relative_error": error, "fault": "wrong; not timed"}
        return {"relative_error": error, "time_s": _timed(layer, [run for run, _ in made])}
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}


def _timed(layer: Layer, runs: Sequence[Callable[[], object]]) -> float:
    return replayed_s(runs, layer.repeats)


def _rated(row: dict[str, Any]) -> dict[str, Any]:
    if "time_s" not in row:
        return row
    return {**row, "bytes_per_s": row["bytes"] / row["time_s"], "flop_per_s": row["flop"] / row["time_s"]}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.experts.bench", description=__doc__)
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="all unless given")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048, help="channels of a token")
    parser.add_argument("--inner", type=int, default=512, help="channels of an expert")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", choices=("few", "many"), help="few tokens, or the cases; both unless given")
    given = parser.parse_args(words)
    if not torch.cuda.is_available() or not available() or interpreted():
        print("needs a CUDA device and Triton without its interpreter", file=sys.stderr)
        return 1
    about = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": copy_bytes_per_s(given.repeats)}
    print(json.dumps(about), flush=True)
    layer = Layer.random(given.experts, given.top_k, given.width, given.inner, given.repeats)
    if given.only != "many":
        for row in bench_few.rows(bench_few.Matrices.beside(layer.into, layer.back, layer.top_k), given.repeats):
            print(json.dumps(row), flush=True)
    for name in () if given.only == "few" else given.case or CASES:
        for row in rows(layer, name, CASES[name]):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main(sys.argv[1:]))
