"""Recorded steps on a CPU: a graph's stand-in runs the very forward that would be recorded, over the same buffer.

So padding, buckets and the table of token slots are proved where there is no GPU; only the replay itself is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hypic.engine.graphs import WARM_CHAINS, Graphs, Outputs, Recorded, decode_bucket, warm_bucket
from hypic.engine.runner import Runner

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB", "max_context": 4096}


@dataclass
class Rerun:
    """Stands in for a graph: ``replay`` computes anew what the graph leaves in its outputs."""

    forward: Callable[[], Outputs]
    outputs: Outputs
    is_running: bool = False
    num_replays: int = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.is_running, self.num_replays = True, self.num_replays + 1
        for kept, made in zip(self.outputs, self.forward(), strict=True):
            kept.copy_(made)
        self.is_running = False


@torch.inference_mode()
def with_recorded_steps(runner: Runner, warm_tokens: Sequence[int] = (64, 192)) -> Runner:
    """The runner, whose small steps go through buckets."""
    assert runner.geometry is not None, "only steps by kernels are recorded"
    pool = runner.pool
    pool.table.flat = torch.zeros(pool.table.spare_place + 1, dtype=torch.int32)
    tiling = runner.geometry.tiling
    graphs = Graphs(runner.model, pool, runner.geometry)
    for num_tokens in (1, 4):
        graphs.decodes.append(_recorded(graphs, decode_bucket(num_tokens, tiling), decodes=True))
    for num_tokens in warm_tokens:
        for num_chains in WARM_CHAINS:
            bucket = warm_bucket(num_tokens, num_chains, tiling, pool.max_context)
            graphs.warm.append(_recorded(graphs, bucket, decodes=False))
    return replace(runner, graphs=graphs)


def _recorded(graphs: Graphs, bucket: Any, decodes: bool) -> Recorded:
    sent = graphs._buffer(bucket, decodes)

    def forward() -> Outputs:
        return graphs._forward(sent, bucket, decodes)

    outputs = Outputs(*(tensor.clone() for tensor in forward()))
    return Recorded(bucket, sent, Rerun(forward, outputs), outputs)  # type: ignore[arg-type]
