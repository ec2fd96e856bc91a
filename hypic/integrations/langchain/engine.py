"""The engine behind a LangChain model: shared in this process or given by hand, and one call of it.

Anything with ``stream`` and ``astream`` (``hypic.types.TextEngine``) will do. What ``hypic.LLM``
offers beyond that is looked up here and nowhere else, each with its fallback.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
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
from hypic.registry import Registry
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


class Lease:
    """One share of the process-wide engine of a model, given back when the last holder lets go of it."""

    def __init__(self, model: str | None, settings: Mapping[str, Any]) -> None:
        from hypic import shared

        self.engine: TextEngine = shared.acquire(model, **settings)
        self._give_back = weakref.finalize(self, shared.release, self.engine)

    def close(self) -> None:
        """Gives the share back now; a second call does nothing."""
        self._give_back()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def registry_of(engine: TextEngine) -> Registry | None:
    """The engine's known segment texts; ``None`` means that flat prompts are not split."""
    registry = getattr(engine, "registry", None)
    return registry if isinstance(registry, Registry) else None


def model_name_of(engine: TextEngine, otherwise: str | None) -> str:
    """What the engine calls its model, else the name it was asked for by; never empty."""
    return str(getattr(engine, "model_name", None) or otherwise or "hypic")


def fingerprint_of(engine: TextEngine) -> str | None:
    """Digest of the model's weights and configuration, where the engine tells."""
    value = getattr(engine, "fingerprint", None)
    return None if value is None else str(value)


def max_context_of(engine: TextEngine) -> int | None:
    """Most tokens of prompt and answer together, where the engine tells."""
    value = getattr(engine, "max_context", None)
    return value if isinstance(value, int) else None


def tokenize_with(engine: TextEngine, text: str) -> list[int]:
    """Token ids of ``text`` by itself.

    Raises:
        NotImplementedError: the engine has no ``tokenize``.
    """
    tokenize = getattr(engine, "tokenize", None)
    if tokenize is None:
        raise NotImplementedError(f"{type(engine).__name__} has no tokenize(text); pass custom_get_token_ids=.")
    return [int(i) for i in tokenize(text)]


def count_tokens_with(engine: TextEngine, text: str) -> int:
    """Number of tokens of ``text`` by itself."""
    count = getattr(engine, "count_tokens", None)
    return len(tokenize_with(engine, text)) if count is None else int(count(text))


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
        return {"policy": self.policy, "chat_template_kwargs": self.chat_template_kwargs}

    def _deadline(self) -> float:
        return time.monotonic() + (float("inf") if self.timeout_s is None else self.timeout_s)

    def _late(self) -> ModelTimeoutError:
        return ModelTimeoutError(f"no complete answer within timeout={self.timeout_s} s; raise it or lower max_tokens.")
