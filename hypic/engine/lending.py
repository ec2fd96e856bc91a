"""Entries for other workers: from the store if they are there, else encoded now, in batches with all else that waits.

What was encoded stays in this worker's store too, but for a trial's. The engine's thread copies an entry out of the
pool; all that comes after, its digest and its way to the peer, happens on the connection's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hypic.engine.calibrate import warming
from hypic.engine.engine import Engine
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel.cost import EncodeCost
from hypic.engine.parallel.listener import Answer
from hypic.engine.parallel.messages import Entry, Refused, Want
from hypic.engine.parallel.streams import Made
from hypic.engine.payload import outgoing
from hypic.engine.segment import CachedSegment
from hypic.engine.store.expiry import is_over
from hypic.engine.task import Emission
from hypic.errors import HypicError
from hypic.types import Segment

logger = logging.getLogger("hypic")
Reply = Callable[[Answer], None]


class Lending:
    """Implements ``listener.Serving`` on an engine's loop; ``generation`` is this process's."""

    def __init__(self, loop: EngineLoop, generation: int) -> None:
        self._loop, self._generation = loop, generation

    def want(self, ask: tuple[int, int], want: Want, reply: Reply) -> None:
        if want.generation != self._generation:
            reply(self._refusal(want, f"generation {want.generation} is over"))
            return
        started = time.monotonic()
        self._loop.post(lambda engine: self._serve(engine, ask, want, reply, started))

    def cancel(self, ask: tuple[int, int]) -> None:
        self._loop.abort(_task_id(ask))

    def _serve(self, engine: Engine, ask: tuple[int, int], want: Want, reply: Reply, started: float) -> None:
        """On the engine's thread."""
        entry = engine.store.find(bytes.fromhex(want.key))

        def sink(emission: Emission) -> None:
            if emission.is_last:
                reply(self._encoded(engine, emission, want, time.monotonic() - started))

        try:
            segment = _segment(want)
            if entry is not None and entry.ids == want.ids and not entry.is_snapshot and not is_over(entry):
                reply(self._entry(engine, entry, want, 0.0, was_held=True))
            else:
                self._loop.submit(warming(_task_id(ask), want.ids, segment, want.seam, want.is_trial), sink)
        except HypicError as error:
            reply(self._refusal(want, str(error)))

    def _encoded(self, engine: Engine, emission: Emission, want: Want, seconds: float) -> Answer:
        if isinstance(emission.result, HypicError):
            return self._refusal(want, str(emission.result))
        entry = engine.store.find(bytes.fromhex(want.key))
        if entry is None or entry.ids != want.ids:
            return self._refusal(want, "its tokens make another key here, or it was evicted at once")
        if entry.is_trial:  # after this step, in which others may wait for it too
            self._loop.post(lambda engine: engine.store.remove(entry.key))
        return self._entry(engine, entry, want, seconds, was_held=False)

    def _entry(self, engine: Engine, entry: CachedSegment, want: Want, seconds: float, was_held: bool) -> Answer:
        engine.admission.expiry.end(entry, want.expires_s)
        engine.tiers.renamed(entry)
        specs, data = outgoing(engine.runner.pool, entry, engine.runner.identity)
        message = Entry(want.nonce, self._generation, want.key, specs, len(data), 0, seconds, was_held, entry.expires_s)
        return Answer(message, Made.here(data))

    def _refusal(self, want: Want, reason: str) -> Answer:
        return Answer(Refused(want.nonce, self._generation, reason))


def _segment(want: Want) -> Segment:
    """What is encoded for another worker.

    Raises:
        ConfigError: its time is over, or is none.
    """
    ttl_s = None if want.expires_s is None else want.expires_s - time.time()
    return Segment("", name=want.name, source=want.source, namespace=want.namespace, ttl_s=ttl_s)


def _task_id(ask: tuple[int, int]) -> str:
    return f"want-{ask[0]}-{ask[1]}"


class Shown:
    """What others were told of a store; ``look`` is called on the engine's thread."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    def look(self, cost: EncodeCost, engine: Engine) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
        """Seconds of encodes that wait, and the keys that came and went since the last look."""
        queued_s = sum(cost.marginal_s(job.num_left) for job in engine.admission.encoding.values() if not job.away)
        held = {entry.key.hex() for entry in engine.store if not entry.is_snapshot and not entry.is_trial}
        added, removed = tuple(held - self._held), tuple(self._held - held)
        self._held = held
        return queued_s, added, removed
