"""Launches of whole steps, handed to ``ready.run`` beside Triton's own key for each: a script, since Triton must not
interpret. It prints how often Triton was asked, how many launches were handed over, how many of those wrongly, and
which kernels were asked for again and again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from hypic_kernels import ready
from hypic_kernels.launch import Launch
from tests.engine.compiling import as_on_an_h200
from tests.engine.harness import Bench
from tests.engine.models.every_model import BUILDERS
from tests.engine.prompts import live, seg

CPU = torch.empty(0).get_device()
STEPS = (
    [*(seg(520, 10 + n) for n in range(3)), live(70, 2)],
    [seg(33, 3), live(1, 1)],
    [live(17, 5)],
    [seg(64, 6), seg(48, 7), live(16, 3)],
)


class StandIn:
    """A kernel that is never compiled: by what Triton would keep it is known which one a launch should get."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.pre_run_hooks = kernel, list[Any]()
        self.arg_names, self.params = kernel.arg_names, kernel.params
        self.binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        self.wanted, self.asked, self.handed, self.wrong = "", 0, 0, 0

    def launch(self, launch: Launch) -> None:
        _, kinds, options = self.binder(*launch.arguments, **launch.constants, **launch.options)
        self.wanted = f"{kinds} {options}"
        ready.run(self, launch.grid, launch.arguments, launch.constants, launch.options, CPU)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        wanted = self.wanted

        def handed_over(*_: Any) -> None:
            self.handed += 1
            self.wrong += wanted != self.wanted

        def ask(*_: Any, **__: Any) -> Any:
            self.asked += 1
            return SimpleNamespace(run=handed_over, function=0, packed_metadata=())

        return ask


BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


def run_steps(name: str, folder: Path, patch: pytest.MonkeyPatch, known: dict[int, StandIn]) -> None:
    config = EngineConfig(device="cpu", dtype="bfloat16", memory="64MiB", max_context=4096, max_running=4, kernels="on")
    bench = Bench(Runner.load(BUILDERS[name](folder / name), config), kernels="on")
    bench.watched.is_noting = False
    as_on_an_h200(patch)
    patch.setattr(Launch, "run", lambda one: known.setdefault(id(one.kernel), StandIn(one.kernel)).launch(one))
    for step in STEPS:
        bench.add(step)
        bench.run()  # to no answer: nothing is computed


def main(names: list[str], is_blind: bool) -> None:
    known: dict[int, StandIn] = {}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(ready, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0)))
        if is_blind:  # to everything but the arguments' number
            patch.setattr(ready, "given_of", lambda given, device: ready.Given((len(given),), given))
        for name in names:
            with patch.context() as inner:
                run_steps(name, Path(folder), inner, known)
    kernels = known.values()
    never = sorted(one.kernel.fn.__name__ for one in kernels if one.asked > 1 and not one.handed)
    counts = {name: sum(getattr(one, name) for one in kernels) for name in ("asked", "handed", "wrong")}
    print(json.dumps({**counts, "never": never}))


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1] == "blind")
