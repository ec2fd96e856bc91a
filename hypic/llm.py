"""``LLM``: a model with its engine in this process. Streaming is the primitive; everything else drains it."""

from __future__ import annotations

import asyncio
import os
import queue
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, overload

from hypic import checkpoints
from hypic.arguments import check_template_inputs
from hypic.compare import Comparison, Question, compare
from hypic.config import EngineConfig
from hypic.engine import starting, weights
from hypic.engine.task import Emission, Task
from hypic.engine.tokenizer import Tokenizer, described
from hypic.engine.worker import vocabulary_of
from hypic.errors import ConfigError, PromptError
from hypic.keeping import Keeping
from hypic.stream import Answer, Inbox, Stream
from hypic.tool_calls import shows_tools
from hypic.turns import Asked, Turns
from hypic.types import (
    Completion,
    Message,
    Policy,
    Prompt,
    PromptLike,
    SamplingParams,
)


class LLM(Keeping):
    """A hybrid-attention language model that answers prompts made of segments.

    ``model`` is a checkpoint folder, or the name of one in the local Hugging Face cache or on the Hub; without it, or
    named ``"hypic-tiny"``, the bundled demonstration model answers (a checkpoint of that name in the working directory
    goes before it). Further keywords are fields of ``EngineConfig`` and of ``Policy``.

    Safe to use from any number of threads and event loops. ``close`` gives all memory back; so does leaving a ``with``.

    Raises:
        ConfigError: a setting is unknown or invalid.
        UnsupportedModel, CheckpointError: the checkpoint is refused, incomplete or unreadable.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        config = EngineConfig.of(**settings)
        is_bundled = checkpoints.is_bundled(model)
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        folder = checkpoints.bundled() if model is None or is_bundled else weights.locate(model)
        self.model_name = model if model is not None else checkpoints.BUNDLED
        tokenizer = Tokenizer(folder)
        started = starting.start(folder, config, vocabulary_of(tokenizer))
        self.max_context, self.fingerprint = started.max_context, started.identity.fingerprint
        super().__init__(config, tokenizer, started.identity, started.router or started.loop, started.workers)
        # A model that is dropped without being closed gives its memory back too.
        self._finalizer = weakref.finalize(self, started.close)
        self._turns = Turns(tokenizer, partial(self._loop.submit, sink=_unheard))

    # -- asking ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Pieces of the answer as they come; the last one carries ``finish_reason``, ``usage`` and ``report``.

        Breaking off frees all that the request holds.

        Raises:
            PromptError, PromptTooLong, StoreFull: the prompt cannot be answered; nothing was stored.
            ConfigError: another argument cannot be right; nothing was computed.
            NonFiniteOutput, WorkerLost, RequestAborted: the answer cannot be completed.
        """
        return self._streamed(self._asked(prompt, sampling, policy, tools, chat_template_kwargs))

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Completion]:
        """``stream`` for event loops; cancelling frees all that the request holds."""
        asked = await asyncio.to_thread(self._asked, prompt, sampling, policy, tools, chat_template_kwargs)
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Emission]()

        def sink(emission: Emission) -> None:
            with suppress(RuntimeError):  # the event loop is gone: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, emission)

        answer = Answer()
        self._loop.submit(asked.task, sink)
        try:
            while not answer.is_over:
                piece = answer.take(await inbox.get())
                if answer.is_over:
                    await asyncio.to_thread(self._turns.answered, asked, answer)
                yield piece
        finally:
            if not answer.is_over:
                self._loop.abort(asked.task.id)

    @overload
    def generate(
        self, prompt: list[PromptLike], sampling: SamplingParams | None = None, **options: Any
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompt: Prompt | str | Sequence[Message], sampling: SamplingParams | None = None, **options: Any
    ) -> Completion: ...
    def generate(self, prompt: Any, sampling: SamplingParams | None = None, **options: Any) -> Any:
        """The whole answer; for a list of prompts all answers, computed together. Options are those of ``stream``."""
        if not _is_many(prompt):
            return Completion.join(list(self.stream(prompt, sampling, **options)))
        given = {"policy": None, "tools": None, "chat_template_kwargs": None}
        unknown = [name for name in options if name not in given]
        if unknown:  # as Python says it of one prompt
            raise TypeError(f"LLM.generate() got an unexpected keyword argument {unknown[0]!r}")
        given |= options
        all_asked = [self._asked(one, sampling, **given) for one in prompt]
        return _together([self._streamed(asked) for asked in all_asked])

    async def agenerate(self, prompt: PromptLike, sampling: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer, for event loops."""
        return Completion.join([piece async for piece in self.astream(prompt, sampling, **options)])

    def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None, **options: Any) -> Completion:
        """``generate`` for a list of messages."""
        return Completion.join(list(self.stream(messages, sampling, **options)))

    def compare(
        self,
        prompt: PromptLike,
        max_tokens: int = 64,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Comparison:
        """The greedy answer in full, in full again in other company, and from segments; where the last differs, which
        segment does it and what to set.

        Raises:
            ConfigError: the policy reuses no segments.
            PromptError, PromptTooLong, StoreFull: as ``generate``.
        """
        task = self._asked(prompt, None, policy, tools, chat_template_kwargs).task
        return compare(task.pieces, task.policy, max_tokens, self._compared)

    def _compared(self, questions: Sequence[Question], sampling: SamplingParams) -> list[Completion]:
        tasks = [Task(self._new_id(), pieces, sampling, policy) for pieces, policy in questions]
        return _together([Stream(self._loop, self._submit(task), task, lambda answer: None) for task in tasks])

    # -- tokens ------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as data."""
        return self.tokenizer.encode_text(text)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode_text(text))

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs, end the engine's thread, give all memory back. More calls do nothing."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _asked(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        policy: Policy | None,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> Asked:
        started = time.perf_counter()
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ConfigError(
                f"sampling is a {type(sampling).__name__}; pass hypic.SamplingParams(...), one for all prompts."
            )
        used = self._policy(policy)
        check_template_inputs(tools, chat_template_kwargs)
        tools = described(tools) if tools else tools
        if tools and not shows_tools(self.tokenizer, tools, chat_template_kwargs):
            raise PromptError("this model's chat template shows no tools; leave tools out or choose another model.")
        pieces = self.tokenizer.encode(prompt, tools=tools, chat_template_kwargs=chat_template_kwargs)
        elapsed = time.perf_counter() - started
        task = Task(self._new_id(), pieces, sampling or SamplingParams(), used, elapsed, notes=self._notes(prompt))
        return Asked(task, prompt, tools, chat_template_kwargs)

    def _notes(self, prompt: PromptLike) -> tuple[str, ...]:
        anew = self.tokenizer.num_encoded_anew(prompt)
        if not anew:
            return ()
        return (f"{anew} assistant turns were not generated here, or too long ago: their text was tokenised anew",)

    def _submit(self, task: Task) -> Inbox:
        inbox: Inbox = queue.SimpleQueue()
        self._loop.submit(task, inbox.put)
        return inbox

    def _streamed(self, asked: Asked) -> Stream:
        return Stream(self._loop, self._submit(asked.task), asked.task, partial(self._answered, asked))

    def _answered(self, asked: Asked, answer: Answer) -> None:
        self._turns.answered(asked, answer)


def _unheard(emission: Emission) -> None:
    """Of a task that nobody waits for."""


def _together(streams: Sequence[Stream]) -> list[Completion]:
    """All answers; if one fails, the others are broken off."""
    try:
        return [Completion.join(list(stream)) for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def _is_many(prompt: Any) -> bool:
    """A list of prompts, as opposed to a list of messages."""
    if isinstance(prompt, (str, bytes, bytearray, Prompt)) or not isinstance(prompt, Sequence):
        return False
    if not prompt:
        raise PromptError("the list is empty; pass a prompt or a list of messages.")
    return not isinstance(prompt[0], Mapping)
