"""One call of the engine behind a LangChain model.

Anything with ``stream`` and ``astream`` (``hypic.types.TextEngine``) will do. hypic's errors leave
here as LangChain's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)

from hypic.errors import ConfigError, HypicError, PromptError, PromptTooLong, StoreFull, UnsupportedModel, WorkerLost
from hypic.types import Completion, Policy, PromptLike, SamplingParams, TextEngine

# The first that fits decides, so subclasses stand before their parents.
_TRANSLATED: tuple[tuple[type[HypicError], type[ModelError]], ...] = (
    (PromptTooLong, ContextOverflowError),
    (StoreFull, ContextOverflowError),
    (PromptError, ModelInvalidRequestError),
    (ConfigError, ModelInvalidRequestError),
    (UnsupportedModel, ModelNotFoundError),
    (WorkerLost, ModelAPIError),
    (HypicError, ModelError),
)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raises hypic's errors as the ``ModelError`` that LangChain's middleware looks for; the cause stays attached."""
    try:
        yield
    except HypicError as error:
        raise next(theirs for ours, theirs in _TRANSLATED if isinstance(error, ours))(str(error)) from error


class Served:
    """A running server where otherwise a share of an engine in this process is held (``Lease``)."""

    def __init__(self, base_url: str, api_key: str | None, model: str | None, max_retries: int | None) -> None:
        from hypic.integrations.remote import RemoteEngine

        retries: dict[str, Any] = {} if max_retries is None else {"max_retries": max_retries}
        self._remote = RemoteEngine(base_url, api_key=api_key, model=model, **retries)

    @property
    def engine(self) -> TextEngine:
        return self._remote

    def close(self) -> None:
        """Closes idle connections."""
        self._remote.close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


@dataclass(frozen=True)
class Call:
    """One generation: an engine and everything about it that is not the prompt.

    Both streams close the engine's own stream however they end, which frees what it held.
    ``timeout_s`` bounds the whole call; ``stream`` can only look at the clock between two pieces.
    """

    engine: TextEngine
    model_name: str
    sampling: SamplingParams
    policy: Policy | None
    chat_template_kwargs: Mapping[str, Any] | None
    timeout_s: float | None
    tools: Sequence[Mapping[str, Any]] = ()

    def stream(self, prompt: PromptLike) -> Generator[Completion]:
        """The answer in pieces, as the engine makes them."""
        deadline = self._deadline()
        with langchain_errors():
            pieces = self.engine.stream(prompt, self.sampling, **self._options())
            try:
                for piece in pieces:
                    if piece.finish_reason is None and time.monotonic() > deadline:
                        raise self._late()
                    yield piece
            finally:
                close = getattr(pieces, "close", None)
                if close is not None:
                    close()

    async def astream(self, prompt: PromptLike) -> AsyncGenerator[Completion]:
        """As ``stream``, on the running event loop; cancelling the task aborts the request."""
        deadline = self._deadline()
        with langchain_errors():
            pieces = self.engine.astream(prompt, self.sampling, **self._options())
            try:
                while (piece := await self._next(pieces, deadline)) is not None:
                    yield piece
            finally:
                aclose = getattr(pieces, "aclose", None)
                if aclose is not None:
                    await aclose()

    async def _next(self, pieces: AsyncIterator[Completion], deadline: float) -> Completion | None:
        left_s = deadline - time.monotonic()
        try:
            async with asyncio.timeout(None if self.timeout_s is None else left_s):
                return await anext(pieces, None)
        except TimeoutError:
            raise self._late() from None

    def _options(self) -> dict[str, Any]:
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {"policy": self.policy, "chat_template_kwargs": self.chat_template_kwargs, **tools}

    def _deadline(self) -> float:
        return time.monotonic() + (float("inf") if self.timeout_s is None else self.timeout_s)

    def _late(self) -> ModelTimeoutError:
        return ModelTimeoutError(f"no complete answer within timeout={self.timeout_s} s; raise it or lower max_tokens.")
