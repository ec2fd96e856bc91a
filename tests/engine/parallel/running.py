"""An engine with workers on a tiny checkpoint, driven by token ids; what it holds can be counted."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hypic.config import EngineConfig
from hypic.engine import starting, workers
from hypic.engine.engine import Engine
from hypic.engine.loop import EngineLoop
from hypic.engine.plan import Piece
from hypic.engine.router import Router
from hypic.engine.sizing import Need
from hypic.engine.store.image import EntryImage, export
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.errors import HypicError
from hypic.types import CacheReport, Policy, SamplingParams
from tests.engine.prompts import live, seg

POLICY = Policy(min_segment_tokens=0)
VOCABULARY = Vocabulary(lambda ids: "")
# The checkpoints have no tokenizer; most tests look at what this process's engine gives away.
ENCODING = workers.Setup(speaks=False, routes=False)


def config(num_workers: int, **changes: object) -> EngineConfig:
    settings = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 8192, "max_running": 8}
    return EngineConfig.of(**{**settings, "threads": 1, "workers": num_workers, **changes})


def cold_prompt(seed: int, count: int = 6, num_tokens: int = 96) -> list[Piece]:
    """Segments that nobody has seen, of lengths about ``num_tokens``, and a question."""
    pieces = [live(5, 1)]
    for number in range(count):
        pieces.append(seg(num_tokens + 7 * (number % 5), 1000 * seed + number, name=f"{seed}/{number}"))
    return [*pieces, live(9, 2)]


@dataclass
class Running:
    """A started engine; ``ask`` is safe from any thread."""

    started: starting.Started
    num_asked: int = 0
    _inboxes: dict[str, queue.SimpleQueue[Emission]] = field(default_factory=dict)

    @property
    def workers(self) -> workers.Workers:
        assert self.started.workers is not None, "there is one worker"
        return self.started.workers

    @contextmanager
    def asked(self, routes: bool, planner: str) -> Iterator[None]:
        """Run the workers otherwise for a while."""
        found, peers = self.workers, self.workers.peers
        setup, found.setup = found.setup, replace(found.setup, routes=routes)
        before, peers.placing.planner = peers.placing.planner, planner
        try:
            yield
        finally:
            found.setup, peers.placing.planner = setup, before

    def submit(self, pieces: Sequence[Piece], max_tokens: int = 8, **options: object) -> str:
        self.num_asked += 1
        id = f"request-{self.num_asked}"
        inbox = self._inboxes[id] = queue.SimpleQueue()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.driver.submit(Task(id, pieces, sampling, **{"policy": POLICY, **options}), inbox.put)  # type: ignore[arg-type]
        return id

    @property
    def driver(self) -> Router | EngineLoop:
        return self.started.router or self.started.loop

    def answer(self, id: str, timeout_s: float = 60.0) -> tuple[tuple[int, ...], CacheReport]:
        ids: tuple[int, ...] = ()
        while True:
            emission = self._inboxes[id].get(timeout=timeout_s)
            if isinstance(emission.result, HypicError):
                raise emission.result
            ids += emission.result.token_ids
            if emission.is_last:
                assert emission.result.report is not None
                return ids, emission.result.report

    def ask(self, pieces: Sequence[Piece], **options: object) -> tuple[tuple[int, ...], CacheReport]:
        return self.answer(self.submit(pieces, **options))

    def images(self) -> dict[bytes, EntryImage]:
        def read(engine: Engine) -> dict[bytes, EntryImage]:
            pool, identity = engine.runner.pool, engine.runner.identity
            return {entry.key: export(pool, entry, identity) for entry in engine.store if not entry.is_snapshot}

        return self.started.loop.call(read)

    def leaked(self) -> Need:
        """What is neither free nor held by the store once all entries are dropped."""

        def count(engine: Engine) -> Need:
            engine.store.clear()
            capacity, free = engine.runner.pool.capacity, engine.runner.pool.free
            assert not engine.admission.encoding, "an encode was left"
            return Need(
                capacity.pages - free.pages, capacity.states - free.states, capacity.transitions - free.transitions
            )

        return self.started.loop.call(count)


@contextmanager
def running(folder: Path, num_workers: int, setup: workers.Setup = ENCODING, **changes: object) -> Iterator[Running]:
    started = starting.start(folder, config(num_workers, **changes), VOCABULARY, setup)
    try:
        found = Running(started)
        if num_workers > 1:
            assert found.workers.wait_usable(60), "a worker was not usable in a minute"
        yield found
    finally:
        started.close()


@contextmanager
def misbehaving(folder: Path, faults: Path, setup: workers.Setup, **changes: object) -> Iterator[Running]:
    """Two workers, the second of which does what is asked for in ``faults``: see ``faulty_worker``."""
    sound = workers.settings_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "settings_of", lambda *args: {**sound(*args), "seed_folder": str(faults)})
        with running(folder, 2, replace(setup, entry="tests.engine.parallel.faulty_worker"), **changes) as engine:
            yield engine


def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for something to hold."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"it did not hold within {timeout_s} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
