"""Entries for other workers: from the store if they are there, else encoded now, in batches with all else that waits.

What was encoded stays in this worker's store too, but for a trial's. The engine's thread only pins entries: they are
copied out of the pool, summed up and sent by the connection's threads, while the engine encodes the next ones. What a
step made is answered at once, so that it travels together.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hypic.engine.calibrate import warming
from hypic.engine.engine import Engine
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel.cost import Pace
from hypic.engine.parallel.listener import Asked
from hypic.engine.parallel.messages import Entry, Refused, Want
from hypic.engine.parallel.sending import Answer, Lease, Packed
from hypic.engine.parallel.streams import Moment
from hypic.engine.parcel import pack
from hypic.engine.segment import CachedSegment
from hypic.engine.store.expiry import is_over
from hypic.engine.task import Emission
from hypic.errors import HypicError
from hypic.types import Policy, Segment

logger = logging.getLogger("hypic")


@dataclass(frozen=True)
class Seen:
    """Seconds of encodes that wait; keys that came and went; for how long the engine is at one step, 0 if it waits;
    what its work costs beside what was measured at the start, and how sure that is."""

    queued_s: float = 0.0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    busy_s: float = 0.0
    scale: float = 1.0
    spread: float = 0.0

    @property
    def is_news(self) -> bool:
        return bool(self.added or self.removed or self.queued_s or self.busy_s)


class Lending:
    """Implements ``listener.Serving`` on an engine's loop; ``generation`` is this process's."""

    def __init__(self, loop: EngineLoop, generation: int) -> None:
        self._loop, self._generation = loop, generation
        self._made: list[tuple[Callable[[Answer], None], Entry, CachedSegment]] = []

    def want(self, asked: Sequence[Asked]) -> None:
        started = time.monotonic()

        def serve(engine: Engine) -> None:
            for one in asked:
                self._serve(engine, one, started)

        self._loop.post(serve)

    def cancel(self, ask: tuple[int, int]) -> None:
        self._loop.abort(_task_id(ask))

    def _serve(self, engine: Engine, asked: Asked, started: float) -> None:
        """On the engine's thread."""
        want, reply = asked.want, asked.reply
        if want.generation != self._generation:
            reply(self._refusal(want, f"generation {want.generation} is over"))
            return
        entry, place = engine.store.find(bytes.fromhex(want.key)), _place(engine, want)

        def sink(emission: Emission) -> None:
            if emission.is_last:
                self._encoded(engine, emission, asked, time.monotonic() - started)

        try:
            segment = _segment(want)
            if entry is not None and entry.ids == want.ids and not entry.is_snapshot and not is_over(entry):
                self._answer(engine, entry, asked, 0.0, was_held=True)
            elif want.primer and place is None:
                reply(self._refusal(want, "segments are encoded behind another primer here"))
            elif want.deterministic and len(want.ids) > engine.scheduler.limit.tokens:
                reply(self._refusal(want, "it is longer than a step here and must not be run in pieces"))
            else:
                how = (_policy(want), want.is_trial, place)
                self._loop.submit(warming(_task_id(asked.ask), [want.ids], segment, *how), sink)
        except HypicError as error:
            reply(self._refusal(want, str(error)))

    def _encoded(self, engine: Engine, emission: Emission, asked: Asked, seconds: float) -> None:
        want, refused = asked.want, emission.result if isinstance(emission.result, HypicError) else None
        entry = engine.store.find(bytes.fromhex(want.key))
        if refused is not None:
            asked.reply(self._refusal(want, str(refused)))
        elif entry is None or entry.ids != want.ids:
            asked.reply(self._refusal(want, "its tokens make another key here, or it was evicted at once"))
        else:
            self._answer(engine, entry, asked, seconds, was_held=False)
            if entry.is_trial:  # after this step, in which others may wait for it too
                self._loop.post(lambda engine: engine.store.forget(entry))

    def _answer(self, engine: Engine, entry: CachedSegment, asked: Asked, seconds: float, was_held: bool) -> None:
        """With this entry, and at once with all others that are there before the next step."""
        engine.admission.expiry.end(entry, asked.want.expires_s)
        engine.tiers.renamed(entry)
        engine.store.lend(entry)
        nonce, key = asked.want.nonce, asked.want.key
        message = Entry(nonce, self._generation, key, entry.num_cached, seconds, was_held, entry.expires_s)
        self._made.append((asked.reply, message, entry))
        if len(self._made) == 1:
            self._loop.post(self._reply)

    def _reply(self, engine: Engine) -> None:
        made, self._made, moment = self._made, [], Moment.now(engine.runner.pool.device)
        for reply, message, entry in made:
            reply(Answer(message, Lent(engine, entry, self._loop, moment)))

    def _refusal(self, want: Want, reason: str) -> Answer:
        return Answer(Refused(want.nonce, self._generation, reason))


class Lent:
    """An entry that was pinned until it is copied; ``made`` is when it was written. Implements ``listener.Lease``."""

    def __init__(self, engine: Engine, entry: CachedSegment, loop: EngineLoop, made: Moment) -> None:
        self._pool, self._entry, self._loop, self._made = engine.runner.pool, entry, loop, made
        self._has_ended = threading.Lock()
        self.num_bytes = entry.num_bytes

    def packed_with(self, others: Sequence[Lease]) -> Packed:
        lent = [self, *(one for one in others if isinstance(one, Lent))]
        assert len(lent) == 1 + len(others), "entries of other lenders do not go into one parcel"
        for moment in {id(one._made): one._made for one in lent}.values():
            moment.wait()
        content, data, total = pack(self._pool, [one._entry for one in lent])
        return Packed(content.num_kept, data, total)

    def end(self) -> None:
        if self._has_ended.acquire(blocking=False):
            self._loop.post(lambda engine: engine.store.take_back(self._entry))


def _segment(want: Want) -> Segment:
    """What is encoded for another worker.

    Raises:
        ConfigError: its time is over, or is none.
    """
    ttl_s = None if want.expires_s is None else want.expires_s - time.time()
    return Segment("", name=want.name, source=want.source, namespace=want.namespace, ttl_s=ttl_s)


def _policy(want: Want) -> Policy:
    is_primed = bool(want.primer)
    is_alone = want.deterministic
    return Policy(
        seam=want.seam, seam_opening=0, min_segment_tokens=0, deterministic=is_alone, primed=is_primed, rungs=is_primed
    )


def _place(engine: Engine, want: Want) -> int | None:
    """How many segments stand before one that is encoded behind the wanted primer here; ``None``: there is no such
    primer, or no room for the text behind it."""
    length = len(want.ids)
    primers = [one for one in engine.runner.identity.primers if one.digest == want.primer and length <= one.longest]
    return primers[0].num_passages if primers else None


def _task_id(ask: tuple[int, int]) -> str:
    return f"want-{ask[0]}-{ask[1]}"


class Shown:
    """What others are told of an engine. It is asked without waiting: a long step does not keep anybody from speaking.

    Keys that came and went are told once.
    """

    def __init__(self, loop: EngineLoop, pace: Pace) -> None:
        self._loop, self._pace = loop, pace
        self._held: set[str] = set()
        self._seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        self._is_asked, self._queued_s = False, 0.0

    @property
    def is_over(self) -> bool:
        return self._loop.is_over

    def look(self) -> Seen:
        """What the engine said since the last look; the next answer is asked for."""
        busy_s, seen = self._loop.busy_s, Seen(self._queued_s)
        with suppress(queue.Empty):
            seen, self._is_asked = self._seen.get_nowait(), False
        self._queued_s = seen.queued_s
        if not self._is_asked:
            self._is_asked = True
            self._loop.post(lambda engine: self._seen.put(self._look(engine)))
        cost = self._pace.cost
        return replace(seen, busy_s=busy_s, scale=cost.scale, spread=cost.spread)

    def _look(self, engine: Engine) -> Seen:
        cost = self._pace.cost
        queued_s = cost.together_s([job.num_left for job in engine.admission.encoding.values() if not job.away])
        held = {entry.key.hex() for entry in engine.store if not entry.is_snapshot and not entry.is_trial}
        added, removed = tuple(held - self._held), tuple(self._held - held)
        self._held = held
        return Seen(queued_s, added, removed)
