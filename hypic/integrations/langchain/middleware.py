"""``HypicMiddleware``: skills, memories and other sources as segments of an agent's system message.

Needs ``langchain`` itself, for its agents; the rest of this package needs ``langchain-core`` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import AgentState, ModelRequest, ModelResponse
from langchain_core.messages import SystemMessage
from langgraph.types import TracePolicy, omit_payload

from hypic.errors import ConfigError
from hypic.integrations._common import block_of
from hypic.integrations.agents import SegmentSource


class HypicMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Adds what ``sources`` hold to the system message, one content block per segment, at every model call.

    Sources are polled first, so an agent that edits its memory reads it as it now is, and only what changed is computed
    again. The model may be any: hints stand in ``extras``, which others do not read.

    Raises:
        ConfigError: something in ``sources`` is none.
    """

    trace_policy = TracePolicy(process_inputs=omit_payload)

    def __init__(self, sources: Sequence[SegmentSource]) -> None:
        super().__init__()
        for source in sources:
            if not isinstance(source, SegmentSource):
                raise ConfigError(f"sources holds a {type(source).__name__}; it needs the methods poll and segments.")
        self.sources = tuple(sources)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(self._with_segments(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        return await handler(await asyncio.to_thread(self._with_segments, request))

    def _with_segments(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        for source in self.sources:
            source.poll()
        blocks = [block_of(segment).to_content() for source in self.sources for segment in source.segments()]
        if not blocks:
            return request
        own = [] if request.system_message is None else _blocks(request.system_message)
        marks = {} if request.system_message is None else request.system_message.additional_kwargs
        return request.override(system_message=SystemMessage(content=[*own, *blocks], additional_kwargs=marks))


def _blocks(message: SystemMessage) -> list[Any]:
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}] if message.content else []
    return list(message.content)
