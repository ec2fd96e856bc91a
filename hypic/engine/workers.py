"""The front's side of many workers: this process's engine is worker 0, the others are started, watched and asked.

``Workers`` starts the processes, tells this engine's admission who may encode for it, and ends all of it. With one
worker nothing of this module is used.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.engine.calibrate import calibrate
from hypic.engine.engine import Engine, Vocabulary
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import EncodeCost
from hypic.engine.parallel.messages import Beat, Hello, Piece
from hypic.engine.parallel.processes import LocalProcess
from hypic.engine.parallel.supervisor import Launch, Supervisor, Times
from hypic.engine.parallel.transport import device_name
from hypic.engine.peers import NEVER, Canary, Patience, Peers
from hypic.engine.runner import Runner
from hypic.errors import ConfigError

logger = logging.getLogger("hypic")
# A worker that fails so often in a row is started again, though its heart beats.
MOST_FAILURES = 3


@dataclass(frozen=True)
class Setup:
    """How workers are run; tests and benchmarks choose other than the defaults."""

    entry: str = "hypic.engine.worker"
    carrier: str = "auto"
    planner: str = "longest-first"
    times: Times = Times()
    patience: Patience = Patience()
    launch: Launch = LocalProcess
    host: str = "127.0.0.1"


class Workers:
    """See the module's docstring. Processes are started at once; ``join`` comes when this one's engine is there."""

    def __init__(self, folder: Path, config: EngineConfig, setup: Setup = Setup()) -> None:
        self.setup = setup
        self._peers: Peers | None = None
        specs = {rank: _spec(rank, folder, config, setup) for rank in range(1, config.workers)}
        self.supervisor = Supervisor(specs, self, setup.times, setup.launch, setup.host)

    def join(self, loop: EngineLoop, cost: EncodeCost, canary: Canary) -> None:
        """Let an engine's admission give work away, once all workers are ready.

        Raises:
            WorkerLost: one cannot start, with its reason.
        """
        self.supervisor.wait_ready()
        self._peers = loop.call(partial(self._joined, loop, cost, canary))
        self._peers.meet(self.supervisor.hellos)

    def _joined(self, loop: EngineLoop, cost: EncodeCost, canary: Canary, engine: Engine) -> Peers:
        device, setup = engine.runner.pool.device, self.setup
        me = Self(0, 1, self.supervisor.secret, device, device_name(device), setup.carrier)
        peers = Peers(me, engine, loop.post, cost, canary, self._failed, setup.patience, setup.planner)
        engine.admission.away = peers
        return peers

    @property
    def peers(self) -> Peers:
        assert self._peers is not None, "no engine has joined"
        return self._peers

    def wait_usable(self, timeout_s: float) -> bool:
        """Until every worker has shown that it makes the same entries; whether all have."""
        deadline_s = time.monotonic() + timeout_s
        while self.peers.ready() < len(self.supervisor.specs):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True

    def stats(self) -> dict[str, Any]:
        """Who is ready, and what went over to others."""
        ready = [{"rank": h.rank, "generation": h.generation, "pid": h.pid} for h in self.supervisor.hellos]
        return {"ready": ready, "usable": self.peers.ready(), **asdict(self.peers.counts)}

    def close(self) -> None:
        """End all workers and wait for it."""
        if self._peers is not None:
            self._peers.close()
        self.supervisor.close()

    # -- what the supervisor tells -----------------------------------------------------------------------------------

    def came(self, hello: Hello) -> None:
        if self._peers is not None:
            self._peers.meet(self.supervisor.hellos)

    def beat(self, beat: Beat) -> None:
        if self._peers is not None:
            self._peers.heard(beat.rank, beat.generation, beat.queued_s, beat.added, beat.removed)

    def piece(self, rank: int, generation: int, piece: Piece) -> None:
        return

    def left(self, rank: int, generation: int, reason: str) -> None:
        if self._peers is not None:
            self._peers.meet(self.supervisor.hellos)

    def _failed(self, rank: int, generation: int, num_failures: int, reason: str) -> None:
        if MOST_FAILURES <= num_failures < NEVER:
            self.supervisor.lose(rank, generation, f"{num_failures} times in a row it {reason}")


@dataclass(frozen=True)
class Started:
    """An engine's loop, and the other workers if there are any."""

    loop: EngineLoop
    workers: Workers | None
    max_context: int
    fingerprint: str

    def close(self) -> None:
        """End all of it; more calls do nothing."""
        self.loop.close()
        if self.workers is not None:
            self.workers.close()


def start(folder: Path, config: EngineConfig, vocabulary: Vocabulary, setup: Setup = Setup()) -> Started:
    """An engine, with as many workers as the settings say. All of them load at the same time.

    Raises:
        UnsupportedModel, CheckpointError: the checkpoint is refused, incomplete or unreadable.
        ConfigError: the device or the memory budget cannot be right.
        WorkerLost: a worker cannot start.
    """
    workers = Workers(folder, config, setup) if config.workers > 1 else None
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
    runner = Runner.load(folder, replace(own, device=device_for(0, config)))
    measured = None if workers is None else calibrate(runner, own.max_step_tokens)
    loop = EngineLoop(Engine(runner, vocabulary, own.max_running, own.max_step_tokens, own.store_bytes))
    started = Started(loop, workers, runner.max_context, runner.identity.fingerprint)
    if workers is not None and measured is not None:
        try:
            workers.join(loop, *measured)
        except BaseException:
            loop.close()
            raise
    return started


def own_share(config: EngineConfig) -> EngineConfig:
    """The settings of one worker of several: its threads and, where several share a device, its part of the memory.

    Raises:
        ConfigError: a device with a number is named for several workers.
    """
    if config.workers == 1:
        return config
    is_cuda, num_gpus = _gpus(config)
    if is_cuda and ":" in config.device:
        raise ConfigError(
            f"device is {config.device!r} and workers is {config.workers}; for several pass device='cuda'."
        )
    sharing = -(-config.workers // num_gpus) if is_cuda else config.workers
    memory = config.memory / sharing if isinstance(config.memory, float) else config.memory
    threads = config.threads
    if threads is None and not is_cuda:
        threads = max(1, (os.cpu_count() or 1) // config.workers)
    return replace(config, memory=memory, threads=threads)


def device_for(rank: int, config: EngineConfig) -> str:
    """The device of a worker: GPUs in turn, or the CPU."""
    is_cuda, num_gpus = _gpus(config)
    return f"cuda:{rank % num_gpus}" if is_cuda and config.workers > 1 else config.device


def _gpus(config: EngineConfig) -> tuple[bool, int]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return num_gpus > 0 and config.device != "cpu", max(num_gpus, 1)


def _spec(rank: int, folder: Path, config: EngineConfig, setup: Setup) -> Mapping[str, Any]:
    settings = {**asdict(own_share(config)), "device": device_for(rank, config), "workers": 1}
    return {
        **{"entry": setup.entry, "folder": str(folder), "settings": settings},
        **{"host": setup.host, "carrier": setup.carrier, "parent": os.getpid()},
    }
