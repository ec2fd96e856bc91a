"""``python -m hypic_kernels.matvec.bench``: products of few tokens on one GPU; JSON lines to stdout.

Projections of a large model in bfloat16: 2048 channels, 16 heads of 256 back to them, a router of 256 experts. Every
run of a replayed graph has a matrix of its own, together more than the cache. A size is compared with the reference in
float32 on what is timed, and not timed if it is wrong. ``library`` is torch's product, behind a norm that is a launch
of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels import available, interpreted, pointwise
from hypic_kernels.matvec import reference
from hypic_kernels.matvec import triton as kernel
from hypic_kernels.matvec.layout import Sizes, choose, choose_normed
from hypic_kernels.timing import copy_bytes_per_s, replayed_s
from hypic_kernels.trust import relative_error

PLAIN = {"out 4096 -> 2048": (2048, 4096), "in 2048 -> 12352": (12352, 2048), "shared 512 -> 2048": (2048, 512)}
BEHIND_NORM = {"router 2048 -> 256": (256, 2048), "in 2048 -> 12352": (12352, 2048)}
SIZES = (
    *(Sizes(4, 1024, 1, 4), Sizes(2, 1024, 1, 4), Sizes(2, 4096, 1, 4), Sizes(4, 512, 4, 4), Sizes(8, 512, 1, 8)),
    *(Sizes(4, 1024, 1, 4, True), Sizes(2, 4096, 1, 4, True)),
)
NORMED_SIZES = (
    Sizes(2, 2048, 1, 4),
    Sizes(2, 2048, 1, 4, True),
    Sizes(1, 2048, 1, 4),
    Sizes(4, 2048, 1, 8),
    Sizes(8, 2048, 1, 8),
)
LIMIT = 2.0**-7
CACHE_BYTES = 256 << 20
MOST_SETS = 64


def draw(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.03)


def plain(num_tokens: int, name: str, repeats: int) -> Iterator[dict[str, Any]]:
    weights, x = matrices(PLAIN[name]), draw(num_tokens, PLAIN[name][1])
    outs = [x.new_full((num_tokens, len(weight)), torch.nan) for weight in weights]
    exact = reference.product(x.float(), weights[0].float())
    for sizes in SIZES:
        runs = [kernel.product(x, weight, out, sizes).run for weight, out in zip(weights, outs, strict=True)]
        chosen = sizes == choose(num_tokens, weights[0].shape, x.dtype)
        about = {"tokens": num_tokens, "name": name, "sizes": sizes._asdict(), "chosen": chosen}
        yield {**about, **timed(runs, outs[0], exact, weights[0], repeats)}
    calls = [_call(lambda weight: F.linear(x, weight), weight) for weight in weights]
    yield {"tokens": num_tokens, "name": name, "sizes": "library", **rated(calls, weights[0], repeats)}


def behind_norm(num_tokens: int, name: str, repeats: int) -> Iterator[dict[str, Any]]:
    weights, width = matrices(BEHIND_NORM[name]), BEHIND_NORM[name][1]
    x, residual, scale = draw(num_tokens, width), draw(num_tokens, width), draw(width)
    outs = [x.new_full((num_tokens, len(weight)), torch.nan) for weight in weights]
    exact = reference.normed_product((x + residual).float(), None, scale, weights[0].float(), 1e-6, True)[0]
    normed, total = torch.empty_like(x), torch.empty_like(x)
    for sizes in NORMED_SIZES:
        runs = [
            kernel.normed_product(x, residual, scale, weight, 1e-6, True, out, normed, total, sizes).run
            for weight, out in zip(weights, outs, strict=True)
        ]
        chosen = sizes == choose_normed(num_tokens, weights[0].shape, x.dtype)
        about = {"tokens": num_tokens, "name": f"norm, {name}", "sizes": sizes._asdict(), "chosen": chosen}
        yield {**about, **timed(runs, outs[0], exact, weights[0], repeats)}

    def library(weight: Tensor) -> Tensor:
        return F.linear(pointwise.add_rms_norm(x, residual, scale, eps=1e-6, is_zero_centred=True)[0], weight)

    calls = [_call(library, weight) for weight in weights]
    yield {"tokens": num_tokens, "name": f"norm, {name}", "sizes": "library", **rated(calls, weights[0], repeats)}


def _call(function: Callable[[Tensor], Tensor], weight: Tensor) -> Callable[[], object]:
    return lambda: function(weight)


def matrices(shape: tuple[int, int]) -> list[Tensor]:
    """As many as the cache cannot hold."""
    return [draw(*shape) for _ in range(min(MOST_SETS, -(-CACHE_BYTES // (2 * shape[0] * shape[1]))))]


def timed(
    runs: Sequence[Callable[[], object]], out: Tensor, exact: Tensor, weight: Tensor, repeats: int
) -> dict[str, Any]:
    from triton.errors import TritonError

    out.fill_(torch.nan)
    try:
        runs[0]()
        error = relative_error(out, exact)
        if not error <= LIMIT:
            return {"relative_error": error, "fault": "wrong; not timed"}
        return {"relative_error": error, **rated(runs, weight, repeats)}
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}


def rated(runs: Sequence[Callable[[], object]], weight: Tensor, repeats: int) -> dict[str, Any]:
    time_s = replayed_s(runs, repeats)
    return {"us": round(1e6 * time_s, 2), "gb_per_s": round(weight.nbytes / time_s / 1e9)}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.matvec.bench", description=__doc__)
    parser.add_argument("--tokens", type=int, action="append", help="1, 2 and 8 unless given")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(words)
    if not torch.cuda.is_available() or not available() or interpreted():
        print("needs a CUDA device and Triton without its interpreter", file=sys.stderr)
        return 1
    print(json.dumps({"copy_bytes_per_s": copy_bytes_per_s(given.repeats)}), flush=True)
    for num_tokens in given.tokens or (1, 2, 8):
        for rows, names in ((plain, PLAIN), (behind_norm, BEHIND_NORM)):
            for name in names:
                for row in rows(num_tokens, name, given.repeats):
                    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main(sys.argv[1:]))
