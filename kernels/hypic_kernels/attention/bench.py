"""``python -m hypic_kernels.attention.bench``: the kernel beside gathered keys and PyTorch's attention; JSON to stdout.

Every case runs as a model's layers do, one call a layer with keys of its own, so that nothing is found in a cache, and
is timed as the replay of a captured graph; times are medians of one call. A layout is compared with the float64
reference before it is timed, and not timed if it is wrong. Bytes are keys and values of every chain once, queries and
results; operations are those of scores and sums that are seen. ``floor_us`` is the longer of what a large copy would
take for these bytes and a large matrix product for these operations, both measured first. ``sdpa`` gathers the keys of
each chain, rotates them and calls ``scaled_dot_product_attention`` with a mask, chain after chain.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels import available, interpreted
from hypic_kernels.attention import Chip, Choice, Config, HeadDims, Load, choose, default_config
from hypic_kernels.attention.check import TOLERANCES
from hypic_kernels.attention.layout import candidates, hopper_config, num_lanes
from hypic_kernels.attention.plan import Plan
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.attention.reference import rotated
from hypic_kernels.timing import copy_bytes_per_s, median_s, replayed_s
from hypic_kernels.trust import relative_error

WIDE = HeadDims(8, 256, 256, 64)
LATENT = HeadDims(32, 64, 512, 64, is_latent=True)
CACHED_BYTES = 200 << 20
"""Keys that are read in turn, so that the second time round they are out of every cache."""


@dataclass(frozen=True)
class Case:
    """Chains of one layer."""

    dims: HeadDims
    num_key_heads: int
    work: tuple[Work, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(work.positions) for work in self.work)

    @property
    def num_keys(self) -> int:
        return sum(work.length for work in self.work)

    def load(self, chip: Chip) -> Load:
        longest = max(work.length for work in self.work)
        return Load(self.num_tokens, len(self.work), longest, self.num_key_heads, chip)

    def num_bytes(self, dtype: torch.dtype) -> int:
        heads = self.num_key_heads * self.dims.group
        asked = self.num_tokens * heads * (self.dims.query_dim + self.dims.value_dim)
        return (self.stored_numbers + asked) * dtype.itemsize

    @property
    def stored_numbers(self) -> int:
        """Keys and values of a layer."""
        return self.num_keys * self.num_key_heads * (self.dims.key_dim + self.dims.value_dim)

    @property
    def num_operations(self) -> int:
        seen = sum(position + 1 for work in self.work for position in work.positions)
        return 2 * seen * self.num_key_heads * self.dims.group * (self.dims.query_dim + self.dims.value_dim)


def warm(num_segments: int, segment_tokens: int, seam: int, tail: int) -> Work:
    """A prompt of cached segments: their seams and the tail are rows."""
    length = num_segments * segment_tokens + tail
    rows = [(n * segment_tokens, seam) for n in range(num_segments)] + [(length - tail, tail)]
    return Work(length, tuple(rows))


CASES = {
    "warm": Case(WIDE, 2, (warm(16, 1024, 8, 128),)),
    "warm-64": Case(WIDE, 2, (warm(64, 1024, 8, 128),)),
    "warm-short": Case(WIDE, 2, (warm(4, 512, 8, 128),)),
    "decode-1": Case(WIDE, 2, (Work.last(16384, 1),)),
    "decode-16": Case(WIDE, 2, (Work.last(16384, 1),) * 16),
    "decode-64": Case(WIDE, 2, (Work.last(16384, 1),) * 64),
    "live": Case(WIDE, 2, (Work.last(16384, 2048),)),
    "latent-decode": Case(LATENT, 1, (Work.last(16384, 1),) * 64),
}
MORE_CASES = {
    "warm-batch": Case(WIDE, 2, (warm(16, 1024, 8, 128),) * 8),
    "full": Case(WIDE, 2, (Work.last(16512, 16512),)),
    "cold": Case(WIDE, 2, (Work.last(1024, 1024),) * 16),
    "warm-4b": Case(HeadDims(4, 256, 256, 64), 4, (warm(16, 1024, 8, 128),)),
    "warm-128": Case(HeadDims(4, 128, 128, 128), 4, (warm(16, 1024, 8, 128),)),
    "latent-warm": Case(LATENT, 1, (warm(16, 1024, 8, 16),)),
}
ALL_CASES = CASES | MORE_CASES


@dataclass(frozen=True)
class Workload:
    """Layers of a case: queries and tables are shared, keys are not."""

    case: Case
    problem: Problem
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    out: Tensor

    @staticmethod
    def random(case: Case, dtype: torch.dtype, device: torch.device | str = "cuda", num_layers: int = 0) -> Workload:
        problem = Problem.random(
            case.dims, case.work, num_key_heads=case.num_key_heads, dtype=dtype, is_drawn_there=True, device=device
        )
        num_layers = num_layers or min(10, 1 + CACHED_BYTES // (case.stored_numbers * dtype.itemsize))
        keys, values = (
            (stored, *(torch.randn_like(stored) for _ in range(num_layers - 1)))
            for stored in (problem.keys, problem.values)
        )
        return Workload(case, problem, keys, values, problem.output())

    def run_kernel(self, layer: int, plan: Plan, config: Config, scratch: Tensor | None) -> None:
        from hypic_kernels.attention import launching as kernel

        p, stored = self.problem, (self.keys[layer], self.values[layer])
        kernel.attend(p.q, *stored, plan, p.cos, p.sin, p.scale, self.out, p.dims, config, scratch)

    def launch_times(self, plan: Plan, config: Config, repeats: int) -> dict[str, float]:
        """Microseconds of every launch of a call, each by itself."""
        from hypic_kernels.attention import launching as kernel

        p, found = self.problem, {}
        layers = [
            list(kernel.launches(p.q, *stored, plan, p.cos, p.sin, p.scale, self.out, p.dims, config))
            for stored in zip(self.keys, self.values, strict=True)
        ]
        for launches in zip(*layers, strict=True):
            time_s = replayed_s([launch.run for launch in launches], repeats)
            found[launches[0].kernel.fn.__name__.strip("_")] = round(time_s * 1e6, 1)
        return found

    def run_sdpa(self, layer: int, chains: Sequence[Gathered]) -> None:
        p = self.problem
        latent = p.dims.value_dim if p.dims.is_latent else 0
        for chain in chains:
            keys = rotated(self.keys[layer][chain.slots], chain.turns, p.cos, p.sin).to(p.q.dtype)
            values = self.values[layer][chain.slots]
            keys = torch.cat([values, keys], dim=-1) if latent else keys
            asked = p.q[chain.tokens]
            turned = rotated(asked[..., latent:], chain.positions, p.cos, p.sin).to(p.q.dtype)
            asked = torch.cat([asked[..., :latent], turned], dim=-1) if latent else turned
            q, k, v = (x.transpose(0, 1)[None] for x in (asked, keys, values))
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=chain.mask, is_causal=chain.is_causal, scale=p.scale, enable_gqa=True
            )
            self.out[chain.tokens] = mixed[0].transpose(0, 1)


@dataclass(frozen=True)
class Gathered:
    """One chain as PyTorch's attention takes it."""

    slots: Tensor
    turns: Tensor
    tokens: slice
    positions: Tensor
    mask: Tensor | None
    is_causal: bool

    @staticmethod
    def of(plan: Plan, work: Sequence[Work]) -> list[Gathered]:
        found, start, token = [], 0, 0
        for w in work:
            tokens = slice(token, token + len(w.positions))
            positions, turns = plan.positions[tokens].long(), torch.arange(w.length, device=plan.slots.device)
            is_whole = w.positions == list(range(w.length))
            mask = None if is_whole or len(positions) == 1 else turns <= positions[:, None]
            slots = plan.slots[start : start + w.length].long()
            found.append(Gathered(slots, turns, tokens, positions, mask, is_whole))
            start, token = start + w.length, tokens.stop
        return found


@dataclass(frozen=True)
class Peak:
    """What the device moves and multiplies at best."""

    bytes_per_s: float
    operations_per_s: float

    @staticmethod
    def measure(repeats: int) -> Peak:
        square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        product_s = median_s(lambda: square @ square, repeats)
        return Peak(copy_bytes_per_s(repeats), 2 * 8192**3 / product_s)

    def floor_s(self, case: Case, dtype: torch.dtype) -> float:
        return max(case.num_bytes(dtype) / self.bytes_per_s, case.num_operations / self.operations_per_s)


def timed(work: Workload, run: Callable[[int], None], repeats: int) -> dict[str, float]:
    """Of one call, from a graph of one call a layer."""
    call_s = replayed_s([functools.partial(run, layer) for layer in range(len(work.keys))], repeats)
    case = work.case
    return {
        "call_us": round(call_s * 1e6, 1),
        "gb_per_s": round(case.num_bytes(work.out.dtype) / call_s / 1e9, 1),
        "tflop_per_s": round(case.num_operations / call_s / 1e12, 1),
    }


def measured(work: Workload, run: Callable[[int], None], exact: Tensor, repeats: int) -> dict[str, Any]:
    """Error, then times; results are poisoned before."""
    from triton.errors import TritonError

    start = time.perf_counter()
    try:
        work.out.fill_(torch.nan)
        run(0)
        error = relative_error(work.out, exact)
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {str(fault)[:160]}"}
    first_s = round(time.perf_counter() - start, 2)
    if not error <= TOLERANCES[work.out.dtype]:
        return {"relative_error": error, "fault": "wrong; not timed"}
    return {"relative_error": error, "first_s": first_s, **timed(work, run, repeats)}


def layouts(case: Case, chosen: Choice, dtype: torch.dtype, chip: Chip, is_whole: bool) -> list[Choice]:
    """The chosen one, with other numbers of lanes and the other way to turn; then other layouts, with ``is_whole`` all
    that the chip has room for."""
    config, tile, limit = chosen.config, chosen.tile, chip.shared_bytes
    plain = config if not config.hopper else default_config(case.dims, dtype, tile, limit)
    found = [chosen._replace(num_lanes=number) for number in (chosen.num_lanes, 2 * chosen.num_lanes)]
    by_hand = hopper_config(case.dims, dtype, tile)
    if by_hand is not None and chip.runs_hopper:
        found.append(chosen._replace(config=by_hand))
    near = [plain, plain._replace(turns_once=case.dims.rotary_dim > 0), plain._replace(block_n=32, num_stages=4)]
    for other, config in [(tile, config) for config in near] + candidates(case.dims, dtype):
        is_near = config.block_m == plain.block_m and not config.turns_once
        is_quick = dtype == torch.float32 or (config.num_stages == 3 and config.block_n > 16)
        fits = config.shared_bytes(case.dims, dtype, limit) <= limit
        if fits and (is_whole or config in near or (is_near and is_quick)):
            lanes = num_lanes(case.dims, dtype, other, config, case.num_key_heads, chip)
            found.append(Choice(min(other, _longest(case)), lanes, config))
    return list(dict.fromkeys(found))


def _longest(case: Case) -> int:
    return max(len(work.positions) for work in case.work)


def rows(case: Case, dtype: torch.dtype, peak: Peak, repeats: int, is_whole: bool) -> Iterator[dict[str, Any]]:
    """The floor, the baseline, then layouts: one row of results each."""
    from hypic_kernels.attention.launching import chip_of

    work = Workload.random(case, dtype)
    exact, chip = work.problem.solve(), chip_of(work.out.device)
    chains = Gathered.of(work.problem.plan, case.work)
    yield {"name": "floor", "floor_us": round(peak.floor_s(case, dtype) * 1e6, 1)}
    yield {"name": "sdpa", **measured(work, lambda layer: work.run_sdpa(layer, chains), exact, repeats)}
    chosen = choose(case.dims, dtype, case.load(chip))
    for choice in layouts(case, chosen, dtype, chip, is_whole):
        plan = work.problem.planned(choice.tile, choice.num_lanes)

        def run(layer: int, plan: Plan = plan, config: Config = choice.config) -> None:
            work.run_kernel(layer, plan, config, None)

        named = {"name": "chosen" if choice == chosen else "attend", "tile": choice.tile, "lanes": choice.num_lanes}
        named |= {"parts": len(plan.part_tile)}
        yield {**named, "config": list(choice.config), **measured(work, run, exact, repeats)}
        if choice == chosen:
            yield {"name": "launches of it", "call_us": work.launch_times(plan, choice.config, repeats)}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.attention.bench", description=__doc__)
    parser.add_argument("--case", choices=ALL_CASES, action="append", help=f"{', '.join(CASES)} unless given")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--all", action="store_true", help="every layout, not only those near the chosen one")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args(words)
    if not available() or interpreted():
        print("this bench needs a CUDA device and Triton, with TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    import triton

    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    peak = Peak.measure(given.repeats)
    print(json.dumps({"device": torch.cuda.get_device_name(), **versions, **dataclasses.asdict(peak)}), flush=True)
    for name in given.case or list(CASES):
        for row in rows(ALL_CASES[name], getattr(torch, given.dtype), peak, given.repeats, given.all):
            print(json.dumps({"case": name, **row}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
