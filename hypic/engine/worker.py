"""One worker's process: an engine of its own, entries for its peers, whole requests for the front. Ends with the front.

It is told what to do by one dictionary (``WorkerSpec``): which checkpoint and settings, who it is, where the front is.
The same code runs as a process of this host and in a Ray actor.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypic.config import EngineConfig
from hypic.engine.calibrate import calibrate
from hypic.engine.engine import Engine, Vocabulary
from hypic.engine.lending import Lending
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel import wire as wires
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import EncodeCost, to_json
from hypic.engine.parallel.listener import Listener
from hypic.engine.parallel.messages import Beat, Failed, Hello, Stop
from hypic.engine.parallel.transport import device_name
from hypic.engine.parallel.wire import Wire
from hypic.engine.runner import Runner
from hypic.errors import HypicError, WorkerLost
from hypic.types import Policy

logger = logging.getLogger("hypic")
# Segments of a batch are sent when the batch ends: smaller batches than a request's own are sent sooner.
BATCH_TOKENS = 4096
PARENT_S = 0.5


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told. ``front`` is where it reports; ``parent`` the process it must not outlive, 0 for none."""

    rank: int
    generation: int
    secret: bytes
    front: tuple[str, int]
    folder: str
    settings: Mapping[str, Any]
    host: str = "127.0.0.1"
    carrier: str = "auto"
    beat_s: float = 0.2
    parent: int = 0

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> WorkerSpec:
        """From the dictionary that a launcher passes on."""
        return cls(
            rank=int(told["rank"]),
            generation=int(told["generation"]),
            secret=bytes.fromhex(told["secret"]),
            front=(str(told["front"][0]), int(told["front"][1])),
            folder=str(told["folder"]),
            settings=told["settings"],
            host=str(told.get("host", "127.0.0.1")),
            carrier=str(told.get("carrier", "auto")),
            beat_s=float(told.get("beat_s", 0.2)),
            parent=int(told.get("parent", 0)),
        )

    @property
    def config(self) -> EngineConfig:
        settings = dict(self.settings)
        return EngineConfig.of(**{**settings, "policy": Policy(**settings.get("policy", {}))})


@dataclass(eq=False)
class Worker:
    """The process's parts once the model is loaded."""

    spec: WorkerSpec
    loop: EngineLoop
    listener: Listener
    hello: Hello
    wire: Wire
    cost: EncodeCost
    _held: set[str] = field(default_factory=set)
    _number: int = 0

    def run(self) -> None:
        """Until the front says so, or is gone."""
        threading.Thread(target=self._beat, name="hypic-heartbeat", daemon=True).start()
        while not isinstance(self.wire.receive(), Stop):
            pass

    def close(self) -> None:
        self.listener.close()
        self.loop.close()

    def _beat(self) -> None:
        try:
            while True:
                self.wire.send(self.loop.call(self._state))
                time.sleep(self.spec.beat_s)
        except HypicError:
            self.wire.close()  # whoever waits for the front's word is woken

    def _state(self, engine: Engine) -> Beat:
        held = {entry.key.hex() for entry in engine.store if not entry.is_snapshot}
        added, removed = tuple(held - self._held), tuple(self._held - held)
        self._held, self._number = held, self._number + 1
        scheduler = engine.scheduler
        queued_s = sum(self.cost.marginal_s(job.num_left) for job in engine.admission.encoding.values())
        num_requests = len(scheduler.waiting) + len(scheduler.running)
        return Beat(self.spec.rank, self.spec.generation, self._number, queued_s, num_requests, added, removed)


def start(spec: WorkerSpec) -> Worker:
    """Load, measure, listen, report.

    Raises:
        HypicError: the checkpoint or the settings cannot be used here.
        WorkerLost: the front is gone.
    """
    import torch

    config = spec.config
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    runner = Runner.load(Path(spec.folder), config)
    step_tokens = min(config.max_step_tokens, BATCH_TOKENS)
    cost, _ = calibrate(runner, step_tokens)
    engine = Engine(runner, Vocabulary(lambda ids: ""), config.max_running, step_tokens, config.store_bytes)
    loop = EngineLoop(engine)
    device = runner.pool.device
    me = Self(spec.rank, spec.generation, spec.secret, device, device_name(device), spec.carrier)
    listener = Listener(me, spec.host, Lending(loop, spec.generation))
    wire = wires.connect(*spec.front, spec.secret)
    host = spec.host if spec.host not in ("", "0.0.0.0") else wire.own_host
    hello = _hello(spec, host, listener.port, me.device_name, runner.identity.fingerprint, cost)
    wire.send(hello)
    return Worker(spec, loop, listener, hello, wire, cost)


def _hello(spec: WorkerSpec, host: str, port: int, device: str, fingerprint: str, cost: EncodeCost) -> Hello:
    return Hello(spec.rank, spec.generation, os.getpid(), host, port, device, fingerprint, to_json(cost))


def work(spec: WorkerSpec) -> None:
    """A worker's whole life."""
    try:
        worker = start(spec)
    except WorkerLost:
        return
    except (HypicError, RuntimeError, OSError) as error:
        _tell_failure(spec, error)
        return
    try:
        worker.run()
    except WorkerLost:
        logger.info("worker %d: the front is gone", spec.rank)
    finally:
        worker.close()


def _tell_failure(spec: WorkerSpec, error: Exception) -> None:
    try:
        wire = wires.connect(*spec.front, spec.secret)
        wire.send(Failed(spec.rank, spec.generation, f"{str(error) or type(error).__name__:.500}"))
    except WorkerLost:
        logger.error("worker %d cannot start: %s", spec.rank, error)


def main(told: Mapping[str, Any]) -> None:
    """A process of its own: it ends when its parent does, and leaves nothing running."""
    spec = WorkerSpec.of(told)
    logging.basicConfig(level=logging.WARNING, format=f"worker {spec.rank}: %(message)s", stream=sys.stderr)
    if spec.parent:
        threading.Thread(target=_watch_parent, args=(spec.parent,), daemon=True).start()
    try:
        work(spec)
    finally:
        sys.stderr.flush()
        os._exit(0)  # threads of libraries must not keep a worker that is done


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)
