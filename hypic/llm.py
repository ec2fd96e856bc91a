"""``LLM``: a model with its engine in this process. Streaming is the primitive; everything else drains it."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, overload

from hypic import checkpoints
from hypic.compare import Asked, Comparison, compare
from hypic.config import EngineConfig
from hypic.engine import inspect, weights
from hypic.engine.engine import Emission, Engine, Task, Vocabulary
from hypic.engine.loop import EngineLoop
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import ConfigError, PromptError
from hypic.registry import Registry
from hypic.stream import Answer, Inbox, Stream
from hypic.tool_calls import shows_tools
from hypic.types import CacheReport, Completion, Message, Policy, Prompt, PromptLike, SamplingParams, Segment

WARM_AT_ONCE = 32


class LLM:
    """A hybrid-attention language model that answers prompts made of segments.

    ``model`` is a checkpoint folder, or the name of one in the local Hugging Face cache or on the Hub; without it the
    bundled demonstration model answers. Further keywords are fields of ``EngineConfig`` and of ``Policy``.

    Safe to use from any number of threads and event loops. ``close`` gives all memory back; so does leaving a ``with``.

    Raises:
        ConfigError: a setting is unknown or invalid.
        UnsupportedModel, CheckpointError: the checkpoint is refused, incomplete or unreadable.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        import torch

        self.config = EngineConfig.of(**settings)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        folder = checkpoints.bundled() if model is None else weights.locate(model)
        self.model_name = model if model is not None else checkpoints.BUNDLED
        self.tokenizer = Tokenizer(folder)
        runner = Runner.load(folder, self.config)
        self.max_context, self.fingerprint = runner.max_context, runner.identity.fingerprint
        vocabulary = Vocabulary(
            self.tokenizer.decode,
            self.tokenizer.eos_ids,
            self.tokenizer.byte_ids,
            self.tokenizer.special_ids,
            dict(self.tokenizer.generation_defaults),
        )
        config = self.config
        engine = Engine(runner, vocabulary, config.max_running, config.max_step_tokens, config.store_bytes)
        self._loop = EngineLoop(engine)
        # A model that is dropped without being closed gives its memory back too.
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._ids = itertools.count()
        self.registry = Registry()

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
            NonFiniteOutput, WorkerLost, RequestAborted: the answer cannot be completed.
        """
        task = self._task(prompt, sampling, policy, tools, chat_template_kwargs)
        return self._streamed(task)

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
        task = await asyncio.to_thread(self._task, prompt, sampling, policy, tools, chat_template_kwargs)
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Emission]()

        def sink(emission: Emission) -> None:
            with suppress(RuntimeError):  # the event loop is gone: nobody waits any more
                loop.call_soon_threadsafe(inbox.put_nowait, emission)

        answer = Answer()
        self._loop.submit(task, sink)
        try:
            while not answer.is_over:
                yield answer.take(await inbox.get())
            self._remember(task, answer)
        finally:
            if not answer.is_over:
                self._loop.abort(task.id)

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
        given = {"policy": None, "tools": None, "chat_template_kwargs": None, **options}
        tasks = [self._task(one, sampling, **given) for one in prompt]
        return self._together([self._streamed(task) for task in tasks])

    def _together(self, streams: Sequence[Stream]) -> list[Completion]:
        """All answers; if one fails, the others are broken off."""
        try:
            return [Completion.join(list(stream)) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

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
        task = self._task(prompt, None, policy, tools, chat_template_kwargs)
        return compare(task.pieces, task.policy, max_tokens, self._answered)

    def _answered(self, asked: Sequence[Asked], sampling: SamplingParams) -> list[Completion]:
        tasks = [Task(self._new_id(), pieces, sampling, policy) for pieces, policy in asked]
        return self._together([self._streamed(task) for task in tasks])

    # -- segments ----------------------------------------------------------------------------------------------------

    def warm(
        self,
        segments: Sequence[Segment],
        *,
        policy: Policy | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[CacheReport]:
        """Encode segments now; ``progress(done, total)`` is told after each.

        Raises:
            PromptTooLong, StoreFull: a segment could never be cached.
        """
        reports: list[CacheReport] = []
        waiting: list[Inbox] = []
        for segment in segments:
            waiting.append(self._warm_one(segment, policy or self.config.policy))
            if len(waiting) >= WARM_AT_ONCE:
                self._warmed(waiting.pop(0), reports, progress, len(segments))
        for inbox in waiting:
            self._warmed(inbox, reports, progress, len(segments))
        return reports

    def _warm_one(self, segment: Segment, policy: Policy) -> Inbox:
        if not isinstance(segment, Segment):
            raise PromptError(f"warm was given {segment!r:.60}; pass a list of Segment.")
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy is {policy!r}; pass hypic.Policy(...).")
        ids = tuple(self.tokenizer.encode_text(segment.text.strip()))
        # The token behind the segment is never run: it stands for the text that will follow.
        return self._submit(Task(self._new_id(), [Piece(ids, segment), Piece((0,))], policy=policy, warm=True))

    def _warmed(
        self,
        inbox: Inbox,
        reports: list[CacheReport],
        progress: Callable[[int, int], None] | None,
        total: int,
    ) -> None:
        report = Answer().take(inbox.get()).report
        assert report is not None, "a warmed segment comes with its report"
        reports.append(report)
        if progress is not None:
            progress(len(reports), total)

    def forget(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        """Drop the idle entries that match all of what is given, snapshots too when nothing is; how many.

        Texts that match are no longer found in flat prompts either.
        """
        if source is None and name is None and namespace is None:
            self.registry.clear()
        else:
            self.registry.forget(source=source, name=name, namespace=namespace)
        return self._loop.call(partial(inspect.forget, source=source, name=name, namespace=namespace))

    def stats(self) -> dict[str, Any]:
        """Counters and sizes: the store's, the pool's, requests waiting and running."""
        return self._loop.call(inspect.stats)

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

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _task(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        policy: Policy | None,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> Task:
        started = time.perf_counter()
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ConfigError(f"sampling is {sampling!r}; pass hypic.SamplingParams(...).")
        if policy is not None and not isinstance(policy, Policy):
            raise ConfigError(f"policy is {policy!r}; pass hypic.Policy(...).")
        if tools and not shows_tools(self.tokenizer, tools, chat_template_kwargs):
            raise PromptError("this model's chat template shows no tools; leave tools out or choose another model.")
        pieces = self.tokenizer.encode(prompt, tools=tools, chat_template_kwargs=chat_template_kwargs)
        used = policy if policy is not None else self.config.policy
        elapsed = time.perf_counter() - started
        return Task(self._new_id(), pieces, sampling or SamplingParams(), used, elapsed, notes=self._notes(prompt))

    def _notes(self, prompt: PromptLike) -> tuple[str, ...]:
        anew = self.tokenizer.num_encoded_anew(prompt)
        if not anew:
            return ()
        return (f"{anew} assistant turns were not generated here, or too long ago: their text was tokenised anew",)

    def _submit(self, task: Task) -> Inbox:
        inbox: Inbox = queue.SimpleQueue()
        self._loop.submit(task, inbox.put)
        return inbox

    def _streamed(self, task: Task) -> Stream:
        return Stream(self._loop, self._submit(task), task, self._remember)

    def _remember(self, task: Task, answer: Answer) -> None:
        """Keep the ids of a generated text for when it comes back, unless a stop string cut it short of its ids."""
        whole = not task.sampling.stop or (answer.ids and answer.ids[-1] in self.tokenizer.eos_ids)
        if whole:
            self.tokenizer.remember("".join(answer.texts), answer.ids)


def _is_many(prompt: Any) -> bool:
    """A list of prompts, as opposed to a list of messages."""
    if isinstance(prompt, (str, bytes, bytearray, Prompt)) or not isinstance(prompt, Sequence):
        return False
    if not prompt:
        raise PromptError("the list is empty; pass a prompt or a list of messages.")
    return not isinstance(prompt[0], Mapping)
