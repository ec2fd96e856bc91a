"""``python -m hypic_kernels.decay.bench``: rows of one layer with one decay a head, on one GPU; JSON lines.

The layer of a large model: 16 heads of 128, float32 as layers give it. ``whole`` is one row of 16,512 tokens,
``encodes`` 16 rows of 1,024. Results are compared with the reference before they are timed. Times are those of a
replayed graph. Bytes are the least there are: each input read once, each output and each state before a chunk written
once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hypic_kernels import available, interpreted
from hypic_kernels.decay.check import TOLERANCE, Precision, Problem
from hypic_kernels.timing import copy_bytes_per_s, replayed_s
from hypic_kernels.trust import relative_error

CASES = (("whole", (16512,)), ("encodes", (1024,) * 16))


def rows(
    heads: tuple[int, int], dims: tuple[int, int], precisions: Sequence[Precision], repeats: int
) -> Iterator[dict[str, Any]]:
    """A line per case, precision and launch."""
    from hypic_kernels.decay import triton as kernel

    for name, lengths in CASES:
        problem = Problem.random(dims, heads, lengths, device="cuda")
        exact = problem.solve()
        num_bytes = sum(tensor.nbytes for tensor in (*problem[:4], problem.v))
        num_bytes += 4 * len(problem.rows.chunk_indices) * heads[1] * dims[0] * dims[1]
        for precision in precisions:
            out = torch.full_like(problem.v, torch.nan)
            walk, read, *results = kernel.launches(*problem, out, precision)
            walk.run()
            read.run()
            errors = [relative_error(found, truth) for found, truth in zip((out, *results), exact, strict=True)]
            line = {"case": name, "num_tokens": len(out), "precision": precision, "relative_errors": errors}
            if max(errors) <= TOLERANCE[precision]:
                line |= {"walk_s": replayed_s([walk.run], repeats), "read_s": replayed_s([read.run], repeats)}
            yield {**line, "bytes": num_bytes}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.decay.bench", description=__doc__)
    parser.add_argument("--precision", choices=list(TOLERANCE), action="append", help="all, unless given")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    given = parser.parse_args(words)
    if not available() or interpreted():
        print("this bench needs a CUDA device and Triton, with TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps({**about, "copy_bytes_per_s": copy_bytes_per_s(10)}), flush=True)
    sizes = (given.heads,) * 2, (given.head_dim,) * 2
    for line in rows(*sizes, given.precision or list(TOLERANCE), 20):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
