"""An engine that is measured: built from a geometry, asked with pieces of token ids, timed by the caller's clock.

Requests go through the engine's thread and queue as those of ``hypic.LLM`` do, which needs a tokenizer; a geometry has
none. Not here: which prompts are asked, and what is made of the times.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hypic.config import EngineConfig
from hypic.engine import forget as forgetting
from hypic.engine import primer
from hypic.engine.engine import Engine
from hypic.engine.loop import EngineLoop
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.engine.shares import step_tokens
from hypic.engine.store.texts import Wanted
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import ConfigError, HypicError
from hypic.types import CacheReport, Completion, Policy, SamplingParams
from hypic_apps.bench.driving import encode_tasks
from hypic_apps.bench.geometries import Geometry
from hypic_apps.bench.prompts import IdsSource, Pieces, Source, TextSource

T = TypeVar("T")
NO_TEXT = Vocabulary(decode=lambda ids: "")


@dataclass(frozen=True)
class Answered:
    """Seconds from the call to each token on the host, the tokens, and the engine's report."""

    arrivals_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    report: CacheReport

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in itertools.pairwise(self.arrivals_s)]


@dataclass(frozen=True)
class Session:
    """See the module's docstring; ``build_s`` are the seconds that building took, weights included."""

    loop: EngineLoop
    source: Source
    policy: Policy
    config: EngineConfig
    build_s: float
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def runner(self) -> Runner:
        return self.loop.engine.runner

    @property
    def device(self) -> torch.device:
        return self.runner.pool.device

    def call(self, run: Callable[[Engine], T]) -> T:
        """Runs something on the engine's own thread, between two steps."""
        return self.loop.call(run)

    def ask(self, pieces: Pieces, policy: Policy, max_tokens: int = 1) -> Answered:
        """One greedy request; what ``pieces`` takes to make is part of the measured time.

        Raises:
            HypicError: the request failed.
        """
        started = time.perf_counter()
        inbox = self._submit(pieces(), policy, max_tokens)
        arrivals: list[float] = []
        ids: list[int] = []
        while True:
            emission = inbox.get()
            arrivals.append(time.perf_counter() - started)
            piece = _completion(emission)
            ids += piece.token_ids
            if emission.is_last:
                assert piece.report is not None, "a whole answer has a report"
                return Answered(tuple(arrivals), tuple(ids), piece.report)

    def submit(self, pieces: Sequence[Piece], policy: Policy, max_tokens: int, sink: Callable[[Emission], None]) -> str:
        """Queues a greedy request and returns its id at once; ``sink`` is called on the engine's thread."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        task = Task(f"bench-{next(self._ids)}", pieces, sampling, policy)
        self.loop.submit(task, sink)
        return task.id

    def encode(self, segments: Sequence[Piece], policy: Policy) -> None:
        """Has segments encoded and stored, for every place; those that are cached stay as they are."""
        inboxes, places = [], self.runner.identity.places if policy.by_place else (0,)
        for task in encode_tasks(segments, policy, f"bench-{next(self._ids)}", places):
            inbox: queue.SimpleQueue[Emission] = queue.SimpleQueue()
            self.loop.submit(task, inbox.put)
            inboxes.append(inbox)
        for inbox in inboxes:
            _completion(inbox.get())

    def forget(self) -> None:
        """Empties the store, all tiers of it."""
        self.call(partial(forgetting.forget, wanted=Wanted(None, None, None)))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _submit(self, pieces: Sequence[Piece], policy: Policy, max_tokens: int) -> queue.SimpleQueue[Emission]:
        inbox: queue.SimpleQueue[Emission] = queue.SimpleQueue()
        self.submit(pieces, policy, max_tokens, inbox.put)
        return inbox


def _completion(emission: Emission) -> Completion:
    if isinstance(emission.result, HypicError):
        raise emission.result
    return emission.result


@contextmanager
def session(geometry: Geometry, settings: Mapping[str, Any], *, ids: bool, seed: int = 0) -> Iterator[Session]:
    """Builds the engine, and gives its memory back afterwards.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError: as ``hypic.LLM``.
    """
    started = time.perf_counter()
    random_weights = {} if geometry.folder is not None else {"load_format": "dummy"}
    config = EngineConfig.of(**random_weights, **settings)
    if geometry.folder is None and config.primer:
        raise ConfigError("primer is a text, and a geometry has no tokenizer; leave out --primer or name a checkpoint.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with geometry.placed() as folder:
        runner = primer.load(folder, config)
        source = _source(folder if geometry.folder is not None else None, runner, ids, seed)
    engine = Engine(
        runner, NO_TEXT, config.max_running, step_tokens(config, runner.pool.device), config.store_bytes, config.tiers
    )
    loop = EngineLoop(engine)
    del engine, runner
    try:
        made = Session(loop, source, config.policy, config, 0.0)
        made.synchronize()
        yield Session(loop, source, config.policy, config, time.perf_counter() - started)
    finally:
        loop.close()


def _source(folder: Path | None, runner: Runner, ids: bool, seed: int) -> Source:
    model: Any = runner.model
    vocab_size = int(model.embed_tokens.num_embeddings)
    if folder is None:
        return IdsSource(vocab_size, seed)
    return TextSource.of(Tokenizer(folder), vocab_size, beforehand=ids, seed=seed)
