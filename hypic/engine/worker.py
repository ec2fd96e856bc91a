"""One worker's process: an engine of its own, entries for its peers, whole requests for the front. Ends with the front.

It is told what to do by one dictionary (``WorkerSpec``): which checkpoint and settings, who it is, where the front is.
The same code runs as a process of this host and in a Ray actor.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypic.config import EngineConfig
from hypic.engine import forget as forgetting
from hypic.engine import primer
from hypic.engine.calibrate import calibrate
from hypic.engine.engine import Engine
from hypic.engine.lending import Lending, Shown
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel import wire as wires
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import Pace, to_json
from hypic.engine.parallel.listener import Listener
from hypic.engine.parallel.messages import (
    Abort,
    Ask,
    Beat,
    Failed,
    Forget,
    Forgot,
    Hello,
    Holdings,
    Message,
    Piece,
    Roster,
    Stop,
)
from hypic.engine.parallel.processes import end_with
from hypic.engine.parallel.transport import device_kind, device_name
from hypic.engine.payload import Canary
from hypic.engine.peers import Peers
from hypic.engine.runner import Runner
from hypic.engine.shares import step_tokens
from hypic.engine.speech import result_to_json, task_of
from hypic.engine.store.texts import Wanted
from hypic.engine.task import Emission, Vocabulary
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import HypicError, WorkerLost
from hypic.types import Policy

logger = logging.getLogger("hypic")
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
    planner: str = "longest-first"
    beat_s: float = 0.2
    parent: int = 0
    speaks: bool = True
    room_bytes: int | None = None

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
            planner=str(told.get("planner", "longest-first")),
            beat_s=float(told.get("beat_s", 0.2)),
            parent=int(told.get("parent", 0)),
            speaks=bool(told.get("speaks", True)),
            room_bytes=None if told.get("room_bytes") is None else int(told["room_bytes"]),
        )

    @property
    def config(self) -> EngineConfig:
        settings = dict(self.settings)
        return EngineConfig.of(**{**settings, "policy": Policy(**settings.get("policy", {}))})


class Worker:
    """The process's parts once the model is loaded."""

    def __init__(self, spec: WorkerSpec, loop: EngineLoop, me: Self, pace: Pace, canary: Canary) -> None:
        self._spec, self._loop, self._me, self._pace, self._canary = spec, loop, me, pace, canary
        self._listener = Listener(me, spec.host, Lending(loop, spec.generation))
        self._wire = wires.connect(*spec.front, spec.secret)
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._shown, self._number = Shown(loop, pace), 0
        self._roster: tuple[Hello, ...] = ()
        self._peers: Peers | None = None
        fingerprint = loop.call(lambda engine: engine.runner.identity.fingerprint)
        self._wire.send(
            Hello(
                *(spec.rank, spec.generation, os.getpid(), self._host, self._listener.port, me.device_name),
                *(fingerprint, to_json(pace.cost), me.device_kind),
            )
        )

    @property
    def _host(self) -> str:
        return self._spec.host if self._spec.host not in ("", "0.0.0.0") else self._wire.own_host

    def run(self) -> None:
        """Until the front says so, or is gone."""
        for run in (self._beat, self._speak):
            threading.Thread(target=run, name="hypic-worker", daemon=True).start()
        while not isinstance(message := self._wire.receive(), Stop):
            self._take(message)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._listener.close()
        self._loop.close()

    def _take(self, message: Message) -> None:
        if isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, Abort):
            self._loop.abort(message.id)
        elif isinstance(message, Forget):
            self._forget(message)
        elif isinstance(message, Roster):
            self._roster = tuple(Hello(**member) for member in message.members)
            if self._peers is not None:
                self._peers.meet(self._roster)
        elif isinstance(message, Holdings) and self._peers is not None:
            self._peers.heard(message)

    def _ask(self, message: Ask) -> None:
        """Answer a whole request. Whoever combines may ask the others: from the first time on, they are called."""
        if self._peers is None:
            self._peers = self._loop.call(self._join)
            self._peers.meet(self._roster)

        def sink(emission: Emission) -> None:
            self._outbox.put(Piece(emission.id, result_to_json(emission.result), emission.is_last))

        self._loop.submit(task_of(message.id, message.task), sink)

    def _join(self, engine: Engine) -> Peers:
        peers = Peers(
            *(self._me, engine, self._loop.post, self._pace, self._canary, lambda *_: None),
            planner=self._spec.planner,
            room_bytes=self._spec.room_bytes,
        )
        engine.admission.jobs.away = peers.placing
        return peers

    def _forget(self, message: Forget) -> None:
        wanted = Wanted(message.source, message.name, message.namespace)
        known = [bytes.fromhex(text) for text in message.texts]
        found, texts = self._loop.call(partial(forgetting.forget, wanted=wanted, also=known))
        fresh = () if wanted.is_all else tuple(needle.hex() for needle in texts.needles - set(known))
        self._outbox.put(Forgot(message.number, asdict(found), fresh))

    def _beat(self) -> None:
        """Beats whatever the engine does, and says for how long it has been at it: the front judges that."""
        while not self._shown.is_over:
            self._number += 1
            seen = self._shown.look()
            self._outbox.put(Beat(self._spec.rank, self._spec.generation, self._number, **vars(seen)))
            time.sleep(self._spec.beat_s)
        self._wire.close()  # whoever waits for the front's word is woken

    def _speak(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._wire.send(message)
        except WorkerLost:
            self._wire.close()


def start(spec: WorkerSpec) -> Worker:
    """Load, measure, listen, report.

    Raises:
        HypicError: the checkpoint or the settings cannot be used here.
        WorkerLost: the front is gone.
    """
    config, folder = spec.config, Path(spec.folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    vocabulary = vocabulary_of(Tokenizer(folder)) if spec.speaks else Vocabulary(lambda ids: "")
    runner = primer.load(folder, config)
    cost, canary = calibrate(runner, step_tokens(config, runner.pool.device))
    engine = engine_of(runner, vocabulary, config, cost.batch_tokens)
    engine.pace = pace = Pace(cost)
    loop, device = EngineLoop(engine), runner.pool.device
    me = Self(spec.rank, spec.generation, spec.secret, device, device_name(device), spec.carrier, device_kind(device))
    return Worker(spec, loop, me, pace, canary)


def engine_of(runner: Runner, vocabulary: Vocabulary, config: EngineConfig, max_step_tokens: int) -> Engine:
    """An engine as the settings say."""
    engine = Engine(runner, vocabulary, config.max_running, max_step_tokens, config.store_bytes, config.tiers)
    engine.admission.expiry.ttl_s = config.ttl_s
    return engine


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What an engine needs of a tokenizer."""
    return Vocabulary(
        tokenizer.decode,
        tokenizer.eos_ids,
        tokenizer.byte_ids,
        tokenizer.special_ids,
        dict(tokenizer.generation_defaults),
    )


def work(spec: WorkerSpec) -> None:
    """A worker's whole life."""
    try:
        worker = start(spec)
    except WorkerLost:
        return
    except (HypicError, RuntimeError, OSError) as error:
        _tell_failure(spec, error)
        return
    gc.collect()
    gc.freeze()  # what is there stays; looking through all of it, as Python does now and then, takes 0.18 s
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
        end_with(spec.parent)
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
