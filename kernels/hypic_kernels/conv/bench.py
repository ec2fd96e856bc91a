"""Times of the short convolution, a row of results per layout; run by ``python -m hypic_kernels.delta.bench``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hypic_kernels.conv import triton as kernel
from hypic_kernels.conv.problem import Problem
from hypic_kernels.conv.sources import CANDIDATES, Config
from hypic_kernels.launch import Launch
from hypic_kernels.timing import replayed_s
from hypic_kernels.trust import relative_error

NUM_SETS = 4


def rows(lengths: tuple[int, ...], num_channels: int, width: int = 4, repeats: int = 20) -> Iterator[dict[str, Any]]:
    """bfloat16, silu fused; both launches together. Checked first, and not timed if wrong."""
    problems = [
        Problem.random(lengths, num_channels, width, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed in range(NUM_SETS)
    ]
    first = problems[0]
    num_bytes = 2 * 2 * num_channels * (len(first.sources) + first.write_sources.numel())
    exact = first.solve(has_bias=False)
    about = {"name": "conv", "num_tokens": len(first.sources), "num_channels": num_channels, "bytes": num_bytes}
    about |= {"case": "decode" if max(lengths) == 1 else "rows", "chunk": 0, "precision": "ieee"}
    for config in CANDIDATES:
        yield {**about, "config": config._asdict(), **_result(problems, config, exact, num_bytes, repeats)}


def _result(problems: list[Problem], config: Config, exact: Any, num_bytes: int, repeats: int) -> dict[str, Any]:
    pools = [problem.outputs() for problem in problems]
    launches: list[Launch] = []
    for p, (out, scratch, tails) in zip(problems, pools, strict=True):
        tables = (p.write_sources, p.write_slots, scratch)
        launches += kernel.convolve(p.x, tails, p.sources, p.weight, None, True, out, *tables, config)
    for launch in launches[:2]:
        launch.run()
    error = max(map(relative_error, (pools[0][0], pools[0][2]), exact))
    if not error <= 2**-8:
        return {"relative_error": error, "fault": "wrong; not timed"}
    time_s = 2 * replayed_s([launch.run for launch in launches], repeats)
    return {"relative_error": error, "time_s": time_s, "bytes_per_s": num_bytes / time_s}
