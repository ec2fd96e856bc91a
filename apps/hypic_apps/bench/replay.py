"""A trace played against an engine in this process: requests are sent when they arrive, whatever is still running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypic.engine.plan import Piece
from hypic.engine.task import Emission
from hypic.errors import HypicError
from hypic.types import CacheReport, Policy
from hypic_apps.bench.records import percentile
from hypic_apps.bench.session import Session


@dataclass(frozen=True)
class Item:
    """One request: when it is sent, its prompt, which is made before, and the tokens of its answer."""

    arrival_s: float
    pieces: Sequence[Piece]
    output_tokens: int


@dataclass
class Seen:
    """What came back of one request, in seconds after it was due."""

    ttft_s: float | None = None
    total_s: float | None = None
    num_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    segments: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Played:
    """A whole run; ``is_whole`` is false where it was broken off because time was up."""

    seen: Sequence[Seen]
    wall_s: float
    is_whole: bool

    def summary(self) -> dict[str, Any]:
        """TTFT and total time in milliseconds, throughput, and what was reused. A request that failed or was broken
        off counts as having no first token yet, which is worse than any that has one."""
        done = [s for s in self.seen if s.total_s is not None and not s.error]
        ttft = [s.ttft_s if s.ttft_s is not None else self.wall_s for s in self.seen]
        total = [s.total_s for s in done if s.total_s is not None]
        prompt = sum(s.prompt_tokens for s in done)
        outcomes = {name: sum(s.segments.get(name, 0) for s in done) for name in ("hit", "encoded", "live")}
        return {
            "requests": len(self.seen),
            "finished": len(done),
            "failed": sum(bool(s.error) for s in self.seen),
            "ttft_ms_p50": 1e3 * percentile(ttft, 50),
            "ttft_ms_p90": 1e3 * percentile(ttft, 90),
            "total_ms_p50": 1e3 * percentile(total, 50) if total else None,
            "requests_per_s": len(done) / self.wall_s,
            "output_tokens_per_s": sum(s.num_tokens for s in self.seen) / self.wall_s,
            "reused_share": sum(s.reused_tokens for s in done) / prompt if prompt else 0.0,
            "segments": outcomes,
            "is_whole": self.is_whole,
        }


def play(session: Session, items: Sequence[Item], policy: Policy, timeout_s: float) -> Played:
    """Sends every request when it is due and waits for all; after ``timeout_s`` what is left is aborted."""
    seen = [Seen() for _ in items]
    left = threading.Semaphore(0)
    started = time.perf_counter()
    ids = []
    for item, one in zip(items, seen, strict=True):
        wait_s = started + item.arrival_s - time.perf_counter()
        if time.perf_counter() - started + max(0.0, wait_s) > timeout_s:
            break
        time.sleep(max(0.0, wait_s))
        ids.append(session.submit(item.pieces, policy, item.output_tokens, _sink(one, started + item.arrival_s, left)))
    finished = sum(left.acquire(timeout=max(0.0, started + timeout_s - time.perf_counter())) for _ in ids)
    wall_s = time.perf_counter() - started
    if finished < len(ids):
        for id in ids:
            session.loop.abort(id)
        session.call(lambda engine: None)  # until the aborts have been dealt with
    return Played(seen, wall_s, finished == len(items))


def _sink(one: Seen, due_s: float, left: threading.Semaphore) -> Callable[[Emission], None]:
    def take(emission: Emission) -> None:
        now = time.perf_counter() - due_s
        if isinstance(emission.result, HypicError):
            one.error = str(emission.result)
            left.release()
            return
        one.num_tokens += len(emission.result.token_ids)
        one.ttft_s = now if one.ttft_s is None else one.ttft_s
        if emission.is_last:
            one.total_s = now
            _note(one, emission.result.report)
            left.release()

    return take


def _note(one: Seen, report: CacheReport | None) -> None:
    if report is not None:
        outcomes = [segment.outcome for segment in report.segments]
        one.prompt_tokens, one.reused_tokens = report.prompt_tokens, report.reused_tokens
        one.segments = {name: outcomes.count(name) for name in outcomes}
