"""``python -m hypic_kernels.compose.bench``: the kernel against a loop of ``baddbmm``, on one GPU; JSON to stdout.

One chain of cached maps through every linear layer of a model, a launch per layer, as a warm request runs it; every
layer has maps of its own, so that nothing is found in a cache. A layout is compared with a float64 reference before it
is timed, and not timed if it is wrong. Times are medians: ``eager_s`` as called from Python, ``graph_s`` as the replay
of a captured graph. Bytes are each map read once; ``copy_bytes_per_s`` is what a large copy reads and writes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.compose import NOT_WANTED, Chains, reference
from hypic_kernels.compose.check import TOLERANCE
from hypic_kernels.compose.layout import Config, Precision, candidates
from hypic_kernels.compose.problem import relative_error
from hypic_kernels.timing import copy_bytes_per_s, median_s

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32x3")


@dataclass(frozen=True)
class Size:
    """What is composed; ``num_chains`` requests walk the same segments in different order."""

    num_layers: int = 30
    num_segments: int = 16
    num_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    num_chains: int = 1
    dtype: str = "float32"

    @property
    def map_bytes(self) -> int:
        """All maps of all layers, once."""
        numbers = self.num_layers * self.num_segments * self.num_heads * self.key_dim * (self.key_dim + self.value_dim)
        return numbers * DTYPES[self.dtype].itemsize

    @property
    def num_operations(self) -> int:
        """Floating-point operations of the products, counted once each."""
        states = self.num_chains * self.num_layers * self.num_segments * self.num_heads
        return states * 2 * self.key_dim * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Workload:
    """Maps of every layer, and where results go."""

    size: Size
    chains: Chains
    orders: tuple[tuple[int, ...], ...]
    transitions: tuple[Tensor, ...]
    end_states: tuple[Tensor, ...]
    initial: Tensor
    before: Tensor
    final: Tensor

    @staticmethod
    def random(size: Size, device: torch.device | str = "cuda") -> Workload:
        dtype, segments = DTYPES[size.dtype], size.num_segments
        orders = tuple(tuple((n + c) % segments for n in range(segments)) for c in range(size.num_chains))
        flat = [segment for order in orders for segment in order]
        ends = [segments * c for c in range(size.num_chains + 1)]
        unwanted = [NOT_WANTED] * len(flat)
        chains = Chains.of(ends, flat, flat, [0] * size.num_chains, out_index=unwanted, device=device)
        heads, key_dim, value_dim = size.num_heads, size.key_dim, size.value_dim
        scale = 0.9 * key_dim**-0.5

        def maps(width: int, by: float) -> tuple[Tensor, ...]:
            shape = (segments, heads, key_dim, width)
            return tuple((torch.randn(shape, device=device) * by).to(dtype) for _ in range(size.num_layers))

        initial = torch.zeros((1, heads, key_dim, value_dim), device=device)
        final = initial.new_empty((size.num_chains, heads, key_dim, value_dim))
        before = initial.new_empty((0, heads, key_dim, value_dim))
        return Workload(size, chains, orders, maps(key_dim, scale), maps(value_dim, 1.0), initial, before, final)

    def exact(self, layer: int) -> Tensor:
        """Final states of one layer in float64."""
        final = self.final.double()
        maps = ([self.transitions[layer]], [self.end_states[layer]])
        reference.compose(self.chains, *maps, self.initial, self.before.double(), final)
        return final

    def run_kernel(self, layer: int, precision: Precision, config: Config) -> None:
        from hypic_kernels.compose import triton as kernel

        maps = ([self.transitions[layer]], [self.end_states[layer]])
        kernel.compose(self.chains, *maps, self.initial, self.before, self.final, precision, config)

    def run_baddbmm(self, layer: int) -> None:
        """As without a kernel: one batched product per step of a chain, maps taken in place where they are float32."""
        for chain, order in enumerate(self.orders):
            state = self.initial[0]
            for segment in order:
                transition, end_state = self.transitions[layer][segment], self.end_states[layer][segment]
                state = torch.baddbmm(end_state.float(), transition.float(), state)
            self.final[chain] = state


def _timed(run: Callable[[], None], size: Size, repeats: int) -> dict[str, float]:
    """Of one pass over all layers, eager and as a graph."""
    eager_s = median_s(run, repeats)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph_s = median_s(graph.replay, repeats)
    return {
        "eager_s": eager_s,
        "graph_s": graph_s,
        "map_bytes_per_s": size.map_bytes / graph_s,
        "operations_per_s": size.num_operations / graph_s,
    }


def _error(run: Callable[[int], None], work: Workload, exact: Sequence[Tensor]) -> float:
    """The larger of the first and last layer's relative errors, results poisoned before."""
    errors = []
    for layer, truth in zip((0, work.size.num_layers - 1), exact, strict=True):
        work.final.fill_(torch.nan)
        run(layer)
        errors.append(relative_error(work.final, truth))
    return max(errors)


def _measured(run: Callable[[int], None], work: Workload, exact: Sequence[Tensor], repeats: int) -> dict[str, object]:
    from triton.errors import TritonError

    try:
        error = _error(run, work, exact)
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}
    if not error <= TOLERANCE:
        return {"relative_error": error, "fault": f"wrong: more than {TOLERANCE:.0e}; not timed"}

    def all_layers() -> None:
        for layer in range(work.size.num_layers):
            run(layer)

    return {"relative_error": error, **_timed(all_layers, work.size, repeats)}


def rows(size: Size, precisions: Sequence[Precision], repeats: int) -> Iterator[dict[str, object]]:
    """The baseline, then every layout: one row of results each."""
    work = Workload.random(size)
    exact = [work.exact(layer) for layer in (0, size.num_layers - 1)]
    yield {"name": "baddbmm", **_measured(work.run_baddbmm, work, exact, repeats)}
    for precision in precisions:
        for config in candidates("dense", size.key_dim, size.value_dim, precision):

            def run(layer: int, precision: Precision = precision, config: Config = config) -> None:
                work.run_kernel(layer, precision, config)

            named = {"name": "compose", "precision": precision, "config": config._asdict()}
            yield {**named, **_measured(run, work, exact, repeats)}


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.compose.bench", description=__doc__)
    for name, default in asdict(Size()).items():
        choices = list(DTYPES) if name == "dtype" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, choices=choices)
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="all, unless given")
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    given = _arguments(words)
    if not available() or interpreted():
        print("this bench needs a CUDA device and Triton, with TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    import triton

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    size = Size(**{name: getattr(given, name) for name in asdict(Size())})
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "size": asdict(size),
        "map_bytes": size.map_bytes,
        "num_operations": size.num_operations,
        "copy_bytes_per_s": copy_bytes_per_s(given.repeats),
        "rows": list(rows(size, given.precision or PRECISIONS, given.repeats)),
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
