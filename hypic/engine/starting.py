"""Starting an engine with as many workers as the settings say; all of them load at the same time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hypic.config import EngineConfig
from hypic.engine import primer
from hypic.engine.calibrate import calibrate
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel.cost import Pace
from hypic.engine.parallel.ray_actors import Launcher
from hypic.engine.router import Router
from hypic.engine.segment import Identity
from hypic.engine.shares import device_for, own_share, step_tokens
from hypic.engine.task import Vocabulary
from hypic.engine.worker import engine_of
from hypic.engine.workers import Setup, Workers


@dataclass(frozen=True)
class Started:
    """An engine's loop, who answers in its place if there are other workers, and these."""

    loop: EngineLoop
    router: Router | None
    workers: Workers | None
    max_context: int
    identity: Identity

    def close(self) -> None:
        """End all of it; more calls do nothing."""
        self.loop.close()
        if self.workers is not None:
            self.workers.close()


def setup_of(config: EngineConfig) -> Setup:
    """How the settings ask for workers to be run.

    Raises:
        ConfigError: by Ray, and Ray is not installed.
    """
    if config.launcher == "processes":
        return Setup()
    launch = Launcher(device_for(0, config).startswith("cuda"))
    return Setup(launch=launch, host=launch.host)


def start(folder: Path, config: EngineConfig, vocabulary: Vocabulary, setup: Setup | None = None) -> Started:
    """An engine, with as many workers as the settings say. All of them load at the same time.

    Raises:
        UnsupportedModel, CheckpointError: the checkpoint is refused, incomplete or unreadable.
        ConfigError: the device or the memory budget cannot be right, or Ray is missing.
        WorkerLost: a worker cannot start.
    """
    workers = Workers(folder, config, setup or setup_of(config)) if config.workers > 1 else None
    try:
        return _start(folder, config, vocabulary, workers)
    except BaseException:
        if workers is not None:
            workers.close()
        raise


def _start(folder: Path, config: EngineConfig, vocabulary: Vocabulary, workers: Workers | None) -> Started:
    own = own_share(config)
    if own.threads is not None:
        torch.set_num_threads(own.threads)
    runner = primer.load(folder, replace(own, device=device_for(0, config)))
    num_step = step_tokens(own, runner.pool.device)
    measured = None if workers is None else calibrate(runner, num_step)
    engine = engine_of(runner, vocabulary, own, num_step)
    pace = engine.pace = None if measured is None else Pace(replace(measured[0], batch_tokens=num_step))
    loop = EngineLoop(engine)
    try:
        router = workers.join(loop, pace, measured[1]) if workers and pace and measured else None
    except BaseException:
        loop.close()
        raise
    return Started(loop, router, workers, runner.max_context, runner.identity)
