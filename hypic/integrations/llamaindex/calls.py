"""One call of the engine behind a LlamaIndex model: everything about it that is not the prompt.

Streaming is the primitive; whole answers drain it. Async is the engine's own async, so a cancelled task aborts its
request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatResponse

from hypic.integrations._common import Request
from hypic.integrations.llamaindex.responses import Answer, whole
from hypic.integrations.llamaindex.tools import Wanted
from hypic.tool_calls import ReplyParser
from hypic.types import Policy, SamplingParams, TextEngine

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One generation. Both streams close the engine's own stream however they end, which frees what it held."""

    engine: TextEngine
    model_name: str
    sampling: SamplingParams
    policy: Policy | None
    chat_template_kwargs: Mapping[str, Any] | None
    wanted: Wanted = Wanted()
    in_reasoning: bool = False

    def stream(self, request: Request, to: Callable[[ChatResponse], T]) -> Generator[T]:
        """The answer as it grows, each response passed through ``to``."""
        answer = self._answer(request)
        pieces = self.engine.stream(request.prompt, self.sampling, **self._options())
        try:
            for piece in pieces:
                response = answer.take(piece)
                if response is not None:
                    yield to(response)
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        self.wanted.check(answer.calls, answer.finish_reason)

    async def astream(self, request: Request, to: Callable[[ChatResponse], T]) -> AsyncGenerator[T]:
        """As ``stream``, on the running event loop."""
        answer = self._answer(request)
        pieces = self.engine.astream(request.prompt, self.sampling, **self._options())
        try:
            async for piece in pieces:
                response = answer.take(piece)
                if response is not None:
                    yield to(response)
        finally:
            aclose = getattr(pieces, "aclose", None)
            if aclose is not None:
                await aclose()
        self.wanted.check(answer.calls, answer.finish_reason)

    def answer(self, request: Request) -> ChatResponse:
        """The whole answer."""
        return whole(list(self.stream(request, lambda response: response)))

    async def aanswer(self, request: Request) -> ChatResponse:
        """The whole answer; cancelling the task aborts the request."""
        return whole([response async for response in self.astream(request, lambda response: response)])

    def _answer(self, request: Request) -> Answer:
        parser = ReplyParser(self.wanted.tools or None, in_reasoning=self.in_reasoning)
        return Answer(parser, self.model_name, request)

    def _options(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "tools": list(self.wanted.tools) or None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
