"""Server-sent events: one ``data:`` line of JSON each, comments while there is nothing to say, an error as an event."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from hypic_apps.server.answers import attended
from hypic_apps.server.errors import FAILED, LOG, ApiError, ClientGone, error_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# A proxy that buffers would hold back tokens and comments alike.
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Events = AsyncGenerator[Mapping[str, Any] | None]


def event(value: Mapping[str, Any]) -> bytes:
    """One object as an event; JSON text has no line breaks of its own."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields, ``None`` as a comment, and ``[DONE]`` at the end; the client's going ends it.

    ``close`` is awaited however it ends: a generator that was never begun does not clean up after itself.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers=HEADERS)
        # The body comes in parts: its length is not known.
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await attended(receive, self._send_all(send))
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            last = await _last_event(events, send)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _last_event(events: Events, send: Send) -> bytes:
    """Sends everything but the last event, which says how it ended."""
    try:
        async for value in events:
            body = KEEP_ALIVE if value is None else event(value)
            await send({"type": "http.response.body", "body": body, "more_body": True})
    except ApiError as error:
        return event(error.body)
    except Exception as error:  # the status is sent: this is the outermost place that can still tell the client
        LOG.error("a stream failed", exc_info=error)
        return event(error_body(500, FAILED, code="internal_error"))
    return DONE
