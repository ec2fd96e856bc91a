"""What a model keeps of texts, apart from answering: warming, listing, pinning, forgetting. ``LLM`` is one of these."""

from __future__ import annotations

import itertools
import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hypic.arguments import check_callable, check_forgetful, check_place, listed_segments
from hypic.config import EngineConfig
from hypic.engine import forget as forgetting
from hypic.engine import inspect, plan
from hypic.engine.loop import EngineLoop
from hypic.engine.plan import Piece
from hypic.engine.router import Router
from hypic.engine.segment import Identity
from hypic.engine.store.texts import Texts, Wanted
from hypic.engine.task import Task
from hypic.engine.tokenizer import Tokenizer
from hypic.engine.workers import Workers, total
from hypic.errors import ConfigError
from hypic.kept import CachedEntry, Forgetful, Forgotten, check_labels, check_meant
from hypic.registry import Registry
from hypic.stream import Inbox
from hypic.types import CacheReport, Policy, Segment
from hypic.warming import ANY_PLACE, any_place, warm, warm_pieces


class Keeping:
    """The texts that an engine keeps; see the module's docstring. All methods may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        identity: Identity,
        loop: EngineLoop | Router,
        workers: Workers | None = None,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._identity, self._loop, self._workers = identity, loop, workers
        self.registry = Registry()
        self._ids = itertools.count()
        self._attached: weakref.WeakSet[Forgetful] = weakref.WeakSet()

    def warm(
        self,
        segments: Sequence[Segment],
        *,
        policy: Policy | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[CacheReport]:
        """Encode segments now; ``progress(done, total)`` is told after each. Each is encoded behind every rung of the
        primer, for all places in a prompt; under ``Policy(rungs=False)`` once.

        Raises:
            PromptError, ConfigError: an argument cannot be right; nothing was encoded.
            PromptTooLong, StoreFull: a segment could never be cached.
        """
        check_callable("progress", progress, "of two numbers, done and total")
        segments, reports = listed_segments("warm", segments), list[CacheReport]()
        used = self._policy(policy)
        places = self._identity.places_of if used.by_place else any_place
        for report in warm(segments, used, self.tokenizer.segment_piece, self._submit_warm, places):
            reports.append(report)
            if progress is not None:
                progress(len(reports), len(segments))
        return reports

    def keys(
        self, segments: Sequence[Segment], *, policy: Policy | None = None, place: int = 0
    ) -> list[tuple[str | None, int]]:
        """Under which key each segment is kept (``None``: it is run live), and how many of its tokens; runs nothing.
        ``place`` is how many segments stand before each in its prompt: where the primer has rungs it may matter.

        Raises:
            PromptError, ConfigError: an argument cannot be right.
        """
        check_place(place)
        used = self._policy(policy).with_(live_last=0)
        planned = (self._planned(segment, used, place) for segment in listed_segments("keys", segments))
        return [(None if p.key is None else p.key.hex(), used.num_cached(len(p.ids), p.seam)) for p in planned]

    def flush(self) -> None:
        """Wait until all that is cached is written to the tiers that outlive this process."""
        while self._loop.call(inspect.flush):
            pass

    def forget(
        self,
        *,
        source: str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        everything: bool = False,
    ) -> Forgotten:
        """Forget the texts that match all of what is given, or with ``everything`` all that is cached; how much of what
        went.

        Their entries go, every entry and snapshot that holds their tokens, what is still being encoded or waits to
        be written, files, known texts in flat prompts, and passages of attached indexes that match. Requests under way
        are answered and leave nothing behind. ``everything`` leaves attached indexes alone.

        Raises:
            ConfigError: it is not said what to forget: no label is given, and not ``everything`` either; or both are.
        """
        check_meant(source, name, namespace, everything)
        wanted = Wanted(source, name, namespace)
        num_texts = self._forget_known(wanted)
        found, texts = self._forget_cached(wanted)
        self.tokenizer.forget(texts.within if not wanted.is_all else None)
        labels = {"source": source, "name": name, "namespace": namespace}
        num_passages = 0 if wanted.is_all else sum(index.forget(**labels) for index in self._attached)
        return replace(found, num_texts=num_texts, num_passages=num_passages)

    def attach(self, index: Forgetful) -> None:
        """Have an index, such as ``hypic_retriever.Index``, forget what this model forgets, for as long as it lives.

        Raises:
            ConfigError: it has no method ``forget``.
        """
        check_forgetful(index)
        self._attached.add(index)

    def entries(self) -> list[CachedEntry]:
        """What is cached, of segments and of conversations."""
        return self._loop.call(inspect.entries)

    def pin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        """Keep what is cached of the texts that match all of what is given, until ``unpin``; how many entries."""
        check_labels(source, name, namespace)
        return self._loop.call(partial(inspect.pin, wanted=Wanted(source, name, namespace)))

    def unpin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        """Let entries be evicted again; how many."""
        check_labels(source, name, namespace)
        return self._loop.call(partial(inspect.unpin, wanted=Wanted(source, name, namespace)))

    def stats(self) -> dict[str, Any]:
        """Counters and sizes: the store's, the pool's, requests waiting and running; the other workers', if any."""
        found = self._loop.call(inspect.stats)
        return found if self._workers is None else {**found, "workers": self._workers.stats()}

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _policy(self, policy: Policy | None) -> Policy:
        used = policy if policy is not None else self.config.policy
        if not isinstance(used, Policy):
            raise ConfigError(f"policy is {policy!r}; pass hypic.Policy(...).")
        return used

    def places(self, policy: Policy | None = None) -> tuple[int, ...]:
        """Numbers of segments before one, one for each way in which a segment is encoded: one for each rung of the
        primer, ``(0,)`` where it has none or under ``Policy(rungs=False)``."""
        return self._identity.places if self._policy(policy).by_place else ANY_PLACE

    def _planned(self, segment: Segment, policy: Policy, place: int) -> plan.PlannedSegment:
        return plan.make(warm_pieces(segment, self.tokenizer.segment_piece, place), policy, self._identity).segments[0]

    def _forget_cached(self, wanted: Wanted) -> tuple[Forgotten, Texts]:
        """Here and on all other workers. What was found under these labels anywhere is forgotten everywhere."""
        found, texts = self._loop.call(partial(forgetting.forget, wanted=wanted))
        if self._workers is None:
            return found, texts
        elsewhere = self._workers.forget(wanted, texts)
        again, _ = self._loop.call(partial(forgetting.forget, wanted=wanted, also=texts.needles))
        return total(total(found, elsewhere), again), texts

    def _forget_known(self, wanted: Wanted) -> int:
        if not wanted.is_all:
            return self.registry.forget(source=wanted.source, name=wanted.name, namespace=wanted.namespace)
        num_texts = len(self.registry)
        self.registry.clear()
        return num_texts

    def _submit_warm(self, pieces: Sequence[Piece], policy: Policy) -> Inbox:
        inbox: Inbox = queue.SimpleQueue()
        self._loop.submit(Task(self._new_id(), pieces, policy=policy, warm=True), inbox.put)
        return inbox

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"
