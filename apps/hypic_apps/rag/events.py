"""Work that tells how far it is, as server-sent events: it stops when nobody reads them any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from hypic.errors import HypicError
from hypic_apps.rag.errors import RagError
from hypic_apps.server.sse import EventStream
from hypic_retriever.errors import RetrieverError

Event = Mapping[str, Any]
Events = AsyncGenerator[Event]
Tell = Callable[[Event], None]
EXPECTED = (HypicError, RagError, RetrieverError)


class Stopped(Exception):
    """Nobody listens any more."""


def progress(what: str, done: int, total: int) -> Event:
    """How far it is."""
    return {"type": "progress", "what": what, "done": done, "total": total}


def stream(events: Events) -> EventStream:
    """Events as a response; what goes wrong is the last of them."""
    guarded = _guarded(events)
    return EventStream(guarded, guarded.aclose)


def error_event(error: Exception) -> Event:
    """The error of a request that has begun to answer, in the shape of all the others."""
    return {"type": "error", "error": {"message": str(error)}}


async def told(work: Callable[[Tell], Event]) -> Events:
    """What ``work`` tells in a thread of its own, then what it returns; closing makes its next ``tell`` raise.

    It has ended when this has, so that whoever waits behind it does not meet it.
    """
    loop, queue, stopped = asyncio.get_running_loop(), asyncio.Queue[Event | None](), threading.Event()

    def tell(event: Event) -> None:
        if stopped.is_set():
            raise Stopped
        loop.call_soon_threadsafe(queue.put_nowait, event)

    task = asyncio.ensure_future(asyncio.to_thread(work, tell))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            yield event
        yield task.result()
    finally:
        stopped.set()
        with suppress(Stopped, *EXPECTED):
            await asyncio.shield(task)


async def _guarded(events: Events) -> AsyncGenerator[Event | None]:
    try:
        async for event in events:
            yield event
    except EXPECTED as error:
        yield error_event(error)
    finally:
        await events.aclose()
