"""What all requests of one server share: the engine, how many may come at once, counters, what was registered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request

from hypic.config import EngineConfig
from hypic.kept import CachedEntry, Forgotten
from hypic.registry import Registry
from hypic.tool_calls import ChatTokenizer, opens_reasoning, shows_tools
from hypic.types import CacheReport, Policy, Segment, TextEngine
from hypic_apps.server.errors import ApiError
from hypic_apps.server.metrics import Metrics
from hypic_apps.server.settings import ServerSettings

MAX_LISTED = 100_000
MAX_TEMPLATES = 64


class ServedEngine(TextEngine, Protocol):
    """All that the server needs of an engine: ``hypic.LLM`` satisfies it."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_context(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def registry(self) -> Registry: ...
    @property
    def tokenizer(self) -> ChatTokenizer: ...
    def tokenize(self, text: str) -> list[int]: ...
    def warm(self, segments: Sequence[Segment], *, policy: Policy | None = None) -> list[CacheReport]: ...
    def forget(
        self,
        *,
        source: str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        everything: bool = False,
    ) -> Forgotten: ...
    def entries(self) -> list[CachedEntry]: ...
    def pin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int: ...
    def unpin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int: ...
    def stats(self) -> dict[str, Any]: ...


@dataclass
class Gate:
    """How many requests may be under way, running and waiting together."""

    limit: int
    num_open: int = 0

    @property
    def is_full(self) -> bool:
        return self.num_open >= self.limit

    def enter(self, num: int) -> None:
        """Takes places for ``num`` requests.

        Raises:
            ApiError: 429 when there are not enough; 400 when there never will be.
        """
        if num > self.limit:
            raise ApiError(400, f"the batch has {num} prompts and the server takes {self.limit} at once; send fewer.")
        if self.num_open + num > self.limit:
            raise ApiError(
                429, f"{self.num_open} requests are under way and no more may wait; try again in a moment.",
                code="queue_full", headers={"retry-after": "1"},
            )  # fmt: skip
        self.num_open += num

    def leave(self) -> None:
        self.num_open -= 1


@dataclass
class Vitals:
    """The engine's counters, asked for between two of its steps; all who ask meanwhile wait for the same answer."""

    engine: ServedEngine
    _pending: asyncio.Future[dict[str, Any]] | None = None

    async def stats(self, timeout_s: float) -> dict[str, Any] | None:
        """``None`` when the engine's step takes longer than ``timeout_s``.

        Raises:
            HypicError: the engine is dead or closed.
        """
        if self._pending is None or self._pending.done():
            self._pending = asyncio.ensure_future(asyncio.to_thread(self.engine.stats))
        done, _ = await asyncio.wait({self._pending}, timeout=timeout_s)
        return self._pending.result() if done else None


@dataclass
class Catalogue:
    """Segments that clients registered, the latest last, bounded. Whether one is still cached is the store's matter."""

    max_listed: int = MAX_LISTED
    rows: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)

    def note(self, segment: Segment, report: CacheReport | None) -> dict[str, Any]:
        """Takes a segment down, with what is known of its entry, and returns its row."""
        key = hashlib.sha256(repr((segment.namespace, segment.text.strip())).encode("utf-8", "replace")).hexdigest()
        told = report.segments[0] if report is not None and report.segments else None
        self.rows[f"seg_{key[:24]}"] = row = {
            "id": f"seg_{key[:24]}",
            "object": "hypic.segment",
            "created": int(time.time()),
            **{label: getattr(segment, label) for label in ("kind", "name", "source", "namespace")},
            "num_chars": len(segment.text),
            "num_tokens": None if told is None else told.num_tokens,
            "num_bytes": None if told is None else told.num_bytes,
            "outcome": None if told is None else told.outcome,
            "reason": "" if told is None else told.reason,
        }
        self.rows.move_to_end(row["id"])
        while len(self.rows) > self.max_listed:
            self.rows.popitem(last=False)
        return row

    def matching(self, **labels: str | None) -> Iterator[dict[str, Any]]:
        """The rows that have all of the given labels."""
        given = {label: value for label, value in labels.items() if value is not None}
        return (row for row in self.rows.values() if all(row[label] == value for label, value in given.items()))

    def drop(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in list(rows):
            del self.rows[row["id"]]


class Service:
    """One server's state. ``close`` ends its own thread, not the engine."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.model_name = settings.model_name or engine.model_name
        self.created = int(time.time())
        self.gate = Gate(engine.config.max_running + settings.max_waiting)
        self.vitals = Vitals(engine)
        self.catalogue = Catalogue()
        self.metrics = Metrics()
        self._opens: dict[str, bool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Encoding a corpus takes long; it gets a thread of its own, one corpus after the other.
        self.warming = ThreadPoolExecutor(1, thread_name_prefix="hypic-warm")

    def check_model(self, name: str | None) -> None:
        """Whether a request names the model that is served, or none.

        Raises:
            ApiError: 404 for another one.
        """
        if name not in (None, self.model_name):
            raise ApiError(
                404, f"the model {name!r} does not exist here; this server has {self.model_name!r}.",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def opens_reasoning(self, chat_template_kwargs: Mapping[str, Any] | None) -> bool:
        """Whether answers under this template begin inside their reasoning; asked once for each set of variables.

        Raises:
            PromptError: the template refuses the variables.
        """
        key = json.dumps(chat_template_kwargs or {}, sort_keys=True)
        if key not in self._opens:
            if len(self._opens) >= MAX_TEMPLATES:
                self._opens.clear()
            self._opens[key] = await asyncio.to_thread(opens_reasoning, self.engine.tokenizer, chat_template_kwargs)
        return self._opens[key]

    async def check_tools(self, tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None) -> None:
        """Whether the model will see the tools that it is offered.

        Raises:
            ApiError: 400; its template would drop them without a word.
        """
        if tools and not await asyncio.to_thread(shows_tools, self.engine.tokenizer, tools, kwargs):
            raise ApiError(
                400, f"the chat template of {self.model_name!r} shows no tools to the model; leave tools out.",
                param="tools", code="unsupported_field",
            )  # fmt: skip

    def keep(self, task: asyncio.Task[None]) -> None:
        """Holds on to a task that nobody waits for: the event loop itself does not."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.warming.shutdown(wait=False, cancel_futures=True)


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    found: Service = request.app.state.service
    return found
