"""Cold requests over several workers: an engine with all its workers, what is asked of it, and how that is timed.

All workers are started once; for fewer of them the rest is left alone. The command is ``parallel_command``, what is
compared ``parallel_check``, what is measured ``parallel_runs``.
"""

from __future__ import annotations

import gc
import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hypic.config import EngineConfig
from hypic.engine import starting, workers
from hypic.engine.calibrate import warming
from hypic.engine.engine import Engine
from hypic.engine.parallel.wants import Counts
from hypic.engine.plan import Piece
from hypic.engine.pool import Layout
from hypic.engine.step_limit import StepLimit
from hypic.engine.store.image import EntryImage, export
from hypic.engine.store.texts import Texts, Wanted
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.errors import HypicError
from hypic.types import Policy, SamplingParams, Segment, TokenLogprob
from hypic_apps.cli.errors import CommandError

NO_TEXT = Vocabulary(decode=lambda ids: "")
USABLE_S = 120.0


@dataclass(frozen=True)
class Said:
    """An answer's tokens, and how likely they and others were, if that was asked for."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Answered:
    """An answer, and the seconds to its first token."""

    ttft_s: float
    said: Said


@dataclass(frozen=True)
class Cold:
    """One cold request, in seconds: to its first token; of that, what planning took, until this worker had encoded its
    own part, and from then until the last entry had come. ``carry_s`` is summed over entries, which overlap with
    encoding. ``combine_s`` is the same request asked again, when all is there."""

    ttft_s: float
    plan_s: float
    own_s: float
    wait_s: float
    carry_s: float
    came_bytes: int
    num_came: int
    num_again: int
    num_taken_back: int
    combine_s: float
    handling: Handling


@dataclass(frozen=True)
class Handling:
    """What entries that came in parcels have taken: seconds of their senders' processors to pack them, of this one's to
    check them, and of this engine's thread to write them."""

    entries: int = 0
    parcels: int = 0
    pack_s: float = 0.0
    check_s: float = 0.0
    write_s: float = 0.0

    @classmethod
    def between(cls, before: Counts, after: Counts) -> Handling:
        return cls(
            after.handled - before.handled,
            after.parcels - before.parcels,
            after.pack_s - before.pack_s,
            after.check_s - before.check_s,
            after.write_s - before.write_s,
        )

    def and_of(self, other: Handling) -> Handling:
        return Handling(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    @property
    def record(self) -> dict[str, float | None]:
        """Milliseconds an entry."""
        count, parcels = self.entries, self.parcels
        spent = {"pack_ms": self.pack_s, "check_ms": self.check_s, "write_ms": self.write_s}
        each = {name: 1e3 * seconds / count if count else None for name, seconds in spent.items()}
        return {**each, "entries_a_parcel": count / parcels if parcels else None}


@dataclass
class Rig:
    """A started engine with its workers."""

    started: starting.Started
    vocab_size: int
    tail_tokens: int
    policy: Policy
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def workers(self) -> workers.Workers | None:
        return self.started.workers

    @property
    def layout(self) -> Layout:
        return self.started.loop.call(lambda engine: engine.runner.pool.layout)

    @property
    def counts(self) -> Counts:
        """What has gone over to others so far."""
        return Counts() if self.workers is None else replace(self.workers.peers.counts)

    def use(self, num_workers: int, planner: str = "longest-first") -> None:
        """Give work to so many workers only."""
        if self.workers is not None:
            self.workers.peers.placing.only = frozenset(range(1, num_workers))
            self.workers.peers.placing.planner = planner

    @contextmanager
    def steps_of(self, num_tokens: int | None) -> Iterator[None]:
        """This worker's steps hold no more for a while; ``None``: as many as ever."""

        def set_to(limit: StepLimit, engine: Engine) -> StepLimit:
            before, engine.scheduler.limit = engine.scheduler.limit, limit
            return before

        limit = None if num_tokens is None else StepLimit(num_tokens, least=1)
        before = None if limit is None else self.started.loop.call(partial(set_to, limit))
        try:
            yield
        finally:
            if before is not None:
                self.started.loop.call(partial(set_to, before))

    def documents(self, tokens: Sequence[int], seed: int) -> list[Piece]:
        random = np.random.default_rng(seed)
        drawn = [random.integers(1, self.vocab_size, count).tolist() for count in tokens]
        return [Piece(tuple(ids), Segment("")) for ids in drawn]

    def cold(self, documents: Sequence[Piece]) -> Cold:
        """Ask for what nobody has; everybody forgets it afterwards."""
        before, began_s = self.counts, time.monotonic()
        ttft_s = self.ask(documents).ttft_s
        after, own_until_s = self.counts, self._last_encoded_s()
        combine_s = self.ask(documents).ttft_s
        self.forget()
        return Cold(
            ttft_s=ttft_s,
            plan_s=after.plan_s - before.plan_s,
            own_s=max(own_until_s - began_s, 0.0),
            wait_s=max(after.last_came_s - max(own_until_s, began_s), 0.0),
            carry_s=after.carry_s - before.carry_s,
            came_bytes=after.came_bytes - before.came_bytes,
            num_came=after.came - before.came,
            num_again=after.fell_back - before.fell_back,
            num_taken_back=after.taken_back - before.taken_back,
            combine_s=combine_s,
            handling=Handling.between(before, after),
        )

    def _last_encoded_s(self) -> float:
        return 0.0 if self.workers is None else self.workers.peers.pace.last_s

    def ask(
        self, documents: Sequence[Piece], max_tokens: int = 1, top: int | None = None, **changes: Any
    ) -> Answered:  # fmt: skip
        """An answer, with the ``top`` likeliest tokens at every place; ``changes`` are those of the policy.

        Raises:
            HypicError: the request failed.
        """
        tail = Piece(tuple(np.random.default_rng(0).integers(1, self.vocab_size, self.tail_tokens).tolist()))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=top)
        return self._answer(Task(self._id(), [*documents, tail], sampling, self.policy.with_(**changes)))

    def encode_alone(self, documents: Sequence[Piece]) -> None:
        """Have this worker encode segments, each in a step that runs nothing else."""
        policy = Policy(seam=self.policy.seam, min_segment_tokens=0)
        for piece in documents:
            self._answer(warming(self._id(), [piece.ids], Segment(""), policy))

    def _id(self) -> str:
        return f"bench-{next(self._numbers)}"

    def _answer(self, task: Task) -> Answered:
        inbox: queue.SimpleQueue[Emission] = queue.SimpleQueue()
        first_s, said, started = 0.0, Said(), time.perf_counter()
        self.started.loop.submit(task, inbox.put)
        while True:
            emission = inbox.get()
            first_s = first_s or time.perf_counter() - started
            if isinstance(emission.result, HypicError):
                raise emission.result
            piece = emission.result
            said = Said((*said.tokens, *piece.token_ids), (*said.logprobs, *piece.logprobs))
            if emission.is_last:
                return Answered(first_s, said)

    def forget(self) -> None:
        """Empty all stores."""
        self.forget_here()
        if self.workers is not None:
            self.workers.forget(Wanted(), Texts(Wanted()))

    def forget_here(self) -> None:
        """Empty this worker's store."""
        self.started.loop.call(lambda engine: engine.store.clear())

    def images(self) -> dict[bytes, EntryImage]:
        def read(engine: Engine) -> dict[bytes, EntryImage]:
            pool, identity = engine.runner.pool, engine.runner.identity
            return {entry.key: export(pool, entry, identity) for entry in engine.store if not entry.is_snapshot}

        return self.started.loop.call(read)


@contextmanager
def rig(folder: Path, config: EngineConfig, tail_tokens: int, carrier: str) -> Iterator[Rig]:
    """An engine with all its workers, each seen to compute the same; nothing is left of it afterwards.

    Raises:
        HypicError: it cannot be started.
        CommandError: a worker is not usable in time.
    """
    setup = starting.setup_of(config)
    setup = workers.Setup(carrier=carrier, launch=setup.launch, host=setup.host, speaks=False, routes=False)
    started = starting.start(folder, config, NO_TEXT, setup)
    try:
        if started.workers is not None and not started.workers.wait_usable(USABLE_S):
            raise CommandError(f"not all of {config.workers} workers can be used after {USABLE_S:.0f} s; see the log.")
        model: Any = started.loop.call(lambda engine: engine.runner.model)
        yield Rig(started, int(model.embed_tokens.num_embeddings), tail_tokens, config.policy)
    finally:
        started.close()
        model = None
        gc.collect()  # the next geometry needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
