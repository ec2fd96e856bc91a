"""Cold requests over several workers: what is asked, timed and checked. The command is ``parallel_command``.

All workers are started once; for fewer of them the rest is left alone. A cold request's time is taken apart into what
planning took, how long entries were on their way, and what the combiner needs once all of them are there, which is the
time of the same request asked again.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hypic.config import EngineConfig
from hypic.engine import starting, workers
from hypic.engine.engine import Engine
from hypic.engine.parallel.simulate import lengths
from hypic.engine.payload import difference
from hypic.engine.plan import Piece
from hypic.engine.store.image import EntryImage, export
from hypic.engine.store.texts import Texts, Wanted
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.errors import HypicError
from hypic.types import Policy, SamplingParams, Segment
from hypic_apps.bench.records import percentile
from hypic_apps.cli.errors import CommandError

NO_TEXT = Vocabulary(decode=lambda ids: "")
USABLE_S = 120.0
CHECKED_SEGMENTS = 4
SIGMA = 0.8
Record = dict[str, Any]


@dataclass(frozen=True)
class Cold:
    """One cold request; times are seconds, ``carry_s`` summed over all entries."""

    ttft_s: float
    plan_s: float
    carry_s: float
    came_bytes: int
    num_came: int
    combine_s: float
    token: int


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

    def use(self, num_workers: int, planner: str = "longest-first") -> None:
        """Give work to so many workers only."""
        if self.workers is not None:
            self.workers.peers.only = frozenset(range(1, num_workers))
            self.workers.peers.planner = planner

    def documents(self, tokens: Sequence[int], seed: int) -> list[Piece]:
        random = np.random.default_rng(seed)
        drawn = [random.integers(1, self.vocab_size, count).tolist() for count in tokens]
        return [Piece(tuple(ids), Segment("")) for ids in drawn]

    def cold(self, documents: Sequence[Piece]) -> Cold:
        """Ask for what nobody has; everybody forgets it afterwards."""
        counts = None if self.workers is None else self.workers.peers.counts
        before = (0.0, 0.0, 0, 0) if counts is None else (counts.plan_s, counts.carry_s, counts.came_bytes, counts.came)
        ttft_s, token = self.ask(documents)
        after = before if counts is None else (counts.plan_s, counts.carry_s, counts.came_bytes, counts.came)
        spent = [b - a for a, b in zip(before, after, strict=True)]
        combine_s, _ = self.ask(documents)
        self.forget()
        return Cold(ttft_s, spent[0], spent[1], int(spent[2]), int(spent[3]), combine_s, token)

    def ask(self, documents: Sequence[Piece]) -> tuple[float, int]:
        """Seconds to the first token, and the token.

        Raises:
            HypicError: the request failed.
        """
        number = next(self._numbers)
        tail = Piece(tuple(np.random.default_rng(0).integers(1, self.vocab_size, self.tail_tokens).tolist()))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        inbox: queue.SimpleQueue[Emission] = queue.SimpleQueue()
        started = time.perf_counter()
        self.started.loop.submit(Task(f"bench-{number}", [*documents, tail], sampling, self.policy), inbox.put)
        result = inbox.get().result
        if isinstance(result, HypicError):
            raise result
        return time.perf_counter() - started, result.token_ids[0]

    def forget(self) -> None:
        """Empty all stores."""
        self.started.loop.call(lambda engine: engine.store.clear())
        if self.workers is not None:
            self.workers.forget(Wanted(), Texts(Wanted()))

    def images(self) -> dict[bytes, EntryImage]:
        def read(engine: Engine) -> dict[bytes, EntryImage]:
            pool, identity = engine.runner.pool, engine.runner.identity
            return {entry.key: export(pool, entry, identity) for entry in engine.store if not entry.is_snapshot}

        return self.started.loop.call(read)


@contextmanager
def rig(folder: Path, config: EngineConfig, tail_tokens: int, carrier: str) -> Iterator[Rig]:
    """An engine with all its workers, each seen to compute the same.

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


def check(made: Rig, num_workers: int, segment_tokens: int) -> Record:
    """Whether so many workers give one worker's token and entries."""
    documents = made.documents([segment_tokens] * CHECKED_SEGMENTS, 7)
    made.use(1)
    _, expected = made.ask(documents)
    images = made.images()
    made.forget()
    made.use(num_workers, "round-robin")
    _, found = made.ask(documents)
    others = made.images()
    made.forget()
    apart = max(difference(others[key], images[key]) for key in images)
    return {"workers": num_workers, "same_token": found == expected, "entries_differ_by": apart}


def even(
    made: Rig, nums: Sequence[int], shape: tuple[int, int], runs: int, told: Callable[[str], None]
) -> list[Record]:
    """Segments of one length, by number of workers."""
    records: list[Record] = []
    for num_workers in nums:
        told(f"{num_workers} workers, {shape[0]} x {shape[1]:,}")
        made.use(num_workers)
        found = [made.cold(made.documents([shape[1]] * shape[0], 100 + run)) for run in range(-1, runs)][1:]
        record = _record(num_workers, "longest-first", shape[0], shape[1], found)
        first = records[0]["ttft_ms_p50"] if records else record["ttft_ms_p50"]
        records.append({**record, "speedup": first / record["ttft_ms_p50"]})
    return records


def uneven(
    made: Rig, num_workers: int, mean_tokens: int, count: int, seeds: int, told: Callable[[str], None]
) -> Record:
    """Lognormal segments: round robin's time over longest-first's, median over seeds."""
    ratios, times = [], {"longest-first": list[float](), "round-robin": list[float]()}
    for seed in range(seeds):
        told(f"{num_workers} workers, {count} uneven segments, seed {seed}")
        tokens = lengths(np.random.default_rng(seed), count, mean_tokens, SIGMA)
        for planner, found in times.items():
            made.use(num_workers, planner)
            found.append(made.cold(made.documents(tokens, 1000 + seed)).ttft_s)
        ratios.append(times["round-robin"][-1] / times["longest-first"][-1])
    return {
        **{"workers": num_workers, "segments": count, "mean_tokens": mean_tokens, "sigma": SIGMA, "seeds": seeds},
        **{f"{name}_ms_p50": 1e3 * percentile(found, 50) for name, found in times.items()},
        "ratio_p50": percentile(ratios, 50),
    }


def _record(num_workers: int, planner: str, count: int, tokens: int, found: Sequence[Cold]) -> Record:
    carry_s, came_bytes = sum(c.carry_s for c in found), sum(c.came_bytes for c in found)
    return {
        **{"workers": num_workers, "planner": planner, "segments": count, "segment_tokens": tokens, "runs": len(found)},
        "ttft_ms_p50": 1e3 * percentile([c.ttft_s for c in found], 50),
        "ttft_ms_p90": 1e3 * percentile([c.ttft_s for c in found], 90),
        "dispatch_ms": 1e3 * percentile([c.plan_s for c in found], 50),
        "exchange_ms": 1e3 * percentile([c.carry_s / max(num_workers - 1, 1) for c in found], 50),
        "combine_ms": 1e3 * percentile([c.combine_s for c in found], 50),
        "entries_sent": percentile([c.num_came for c in found], 50),
        "link_gb_per_s": came_bytes / carry_s / 1e9 if carry_s else None,
    }
