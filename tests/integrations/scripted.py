"""An engine that says what it is told to and remembers what it was asked: no model, no tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypic.engine.messages import split_turns
from hypic.registry import Registry
from hypic.types import (
    CacheReport,
    Completion,
    Policy,
    Prompt,
    PromptLike,
    SamplingParams,
    Segment,
    SegmentReport,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    prompt: PromptLike
    sampling: SamplingParams
    policy: Policy | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        assert not isinstance(self.prompt, (str, Prompt)), "the prompt is no list of messages"
        return list(self.prompt)


def said(prompt: PromptLike) -> list[tuple[str, str]]:
    """Role and exact text of every message, as the engine lays them out."""
    if isinstance(prompt, (str, Prompt)):
        return [(turn.fields["role"], "".join(part.text for part in turn.parts)) for turn in split_turns(prompt)]
    # Only an assistant's blocks have nothing between them by themselves.
    joined = [{**m, "role": "assistant"} if m.get("glue") == "" else m for m in prompt]
    texts = ["".join(part.text for part in turn.parts) for turn in split_turns(joined)]
    return [(message["role"], text) for message, text in zip(prompt, texts, strict=True)]


def segments(prompt: PromptLike) -> list[Segment]:
    """What the engine would cache, in order."""
    return [part.segment for turn in split_turns(prompt) for part in turn.parts if part.segment is not None]


def bodies(prompt: PromptLike) -> list[str]:
    return [segment.text for segment in segments(prompt)]


@dataclass
class ScriptedEngine:
    """Satisfies ``TextEngine``. ``error`` is raised before the first piece, ``wait_s`` passes before each."""

    answer: str = "It was built in 1871."
    reasoning: str = ""
    error: Exception | None = None
    wait_s: float = 0.0
    usage: Usage = Usage(prompt_tokens=100, completion_tokens=5, cached_tokens=60, created_tokens=30)
    registry: Registry = field(default_factory=Registry)
    asked: list[Asked] = field(default_factory=list)
    num_open: int = 0
    num_closed: int = 0
    num_finished: int = 0
    model_name: str = "scripted"
    fingerprint: str = "f00d"
    max_context: int = 4096
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def tokenize(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def count_tokens(self, text: str) -> int:
        return len(self.tokenize(text))

    def stream(
        self, prompt: PromptLike, sampling: SamplingParams | None = None, **options: Any
    ) -> Iterator[Completion]:
        self._ask(prompt, sampling, **options)
        try:
            yield from self._pieces(prompt)
            self.num_finished += 1
        finally:
            self._close()

    async def astream(
        self, prompt: PromptLike, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Completion]:
        self._ask(prompt, sampling, **options)
        try:
            for piece in self._pieces(prompt):
                await asyncio.sleep(self.wait_s)
                yield piece
            self.num_finished += 1
        finally:
            self._close()

    @property
    def last(self) -> Asked:
        return self.asked[-1]

    def _ask(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        with self.lock:
            self.num_open += 1
            self.asked.append(Asked(prompt, sampling or SamplingParams(), policy, tools, chat_template_kwargs))

    def _close(self) -> None:
        with self.lock:
            self.num_open -= 1
            self.num_closed += 1

    def _pieces(self, prompt: PromptLike) -> Iterator[Completion]:
        if self.error is not None:
            raise self.error
        words = self.answer.split(" ")
        if self.reasoning:
            yield Completion(reasoning=self.reasoning)
        for n, word in enumerate(words):
            text = word if n == 0 else f" {word}"
            yield Completion(text=text, token_ids=(n,), logprobs=(TokenLogprob(n, -0.5),))
        yield Completion(finish_reason="stop", usage=self.usage, report=self._report(prompt))

    def _report(self, prompt: PromptLike) -> CacheReport:
        reports = tuple(SegmentReport(s.kind, s.name, s.source, "hit", 30, tier="device") for s in segments(prompt))
        return CacheReport(reports, 100, 40, 60, {"ttft": 0.1}, Policy(), self.fingerprint, "0", ("scripted",))
