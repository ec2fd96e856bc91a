"""How many kernels a step would launch on a GPU, counted on a CPU: operators of torch that compute or move something,
and calls of our own kernels, whose references are counted as one each."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hypic.engine.layers import mamba2, mlp, moe, norm, rotary, routers
from hypic_kernels import attention, compose, conv, decay, delta, experts, pointwise

# Launches of a call of ours.
OURS: Mapping[Any, Mapping[str, int]] = {
    attention: {"attend": 2, "attend_latent": 2},
    compose: {"compose": 1, "write_rows": 1},
    conv: {"convolve": 1},
    decay: {"lift": 1, "read": 1, "step": 1},
    delta: {"lift": 2, "read": 1, "step": 1, "scan": 3, "run": 5, "settle": 1},
    experts: {"route": 1, "route_groups": 1, "order": 1, "gate_up": 1, "down": 1, "combine": 1},
    pointwise: {"add_rms_norm": 1, "silu_mul": 1, "heads": 1, "gated_group_norm": 1},
}
# They make a tensor, or look at one, without a launch.
SILENT = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "_unsafe_view", "lift_fresh")


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is on, by name; operators within a call of ours are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.is_within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.is_within and not func.is_view and name not in SILENT:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def counting(self, name: str, num_launches: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, counted as so many launches."""

        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            if self.is_within:
                return call(*args, **options)
            self.counts[name] += num_launches
            self.is_within = True
            try:
                return call(*args, **options)
            finally:
                self.is_within = False

        return counted

    @contextmanager
    def of(self, block: nn.Module, found: list[Counter[str]]) -> Iterator[None]:
        """Adds what each call of ``block`` launches to ``found``."""
        start: list[Counter[str]] = []
        before = block.register_forward_pre_hook(lambda *_: start.append(self.counts.copy()))
        after = block.register_forward_hook(lambda *_: found.append(self.counts - start.pop()))
        try:
            yield
        finally:
            before.remove()
            after.remove()


def as_on_a_gpu(patch: pytest.MonkeyPatch, launches: Launches) -> None:
    """Layers take the path of a GPU, on kernels' references; calls of ours are counted."""
    for room in (mamba2, mlp, norm, rotary, routers):
        patch.setattr(room, "by_kernel", lambda x: not torch.is_grad_enabled())
    patch.setattr(moe.Experts, "can_multiply", lambda self, x: True)
    patch.setattr(moe.Experts, "can_group", lambda self, x: False)
    for package, calls in OURS.items():
        for name, num_launches in calls.items():
            label = f"{package.__name__.rpartition('.')[2]}.{name}"
            patch.setattr(package, name, launches.counting(label, num_launches, getattr(package, name)))
