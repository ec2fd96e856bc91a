"""What clients may send: OpenAI's fields, the further ones that open servers share, and ours under ``hypic``.

What becomes of other fields is said in ``unsupported``. What a message looks like inside is for the engine to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hypic.types import MOST_LOGPROBS, Policy, SamplingParams
from hypic_apps.server import unsupported
from hypic_apps.server.errors import refused

POLICY = tuple(f.name for f in fields(Policy))
# Numbers that every kind of request has, under the names of ``SamplingParams``.
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WITH_CONTENT = ("system", "developer", "user", "tool")


class SegmentIn(BaseModel):
    """One segment: the fields of ``hypic.Segment``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(pattern=r"\S")]
    kind: str = "document"
    name: str | None = None
    source: str | None = None
    namespace: str | None = None
    cache: bool | None = None
    ttl_s: float | None = None
    seam: int | None = None


class HypicOptions(BaseModel):
    """Ours, for one request; policy fields left out are as the server was started.

    ``split_flat`` finds registered texts again in flat strings. ``parse`` says what is read out of a chat answer:
    reasoning and tool calls, or less. ``return_tokens`` adds token ids. In ``/v1/completions`` ``segments`` stand
    before the prompt, with ``glue`` between.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    namespace: str | None = None
    reuse: str | None = None
    seam: int | None = None
    min_segment_tokens: int | None = None
    compose: str | None = None
    rotate: bool | None = None
    deterministic: bool | None = None
    tail_seam: int | None = None
    seam_share: float | None = None
    seam_every: int | None = None
    live_last: int | None = None
    primed: bool | None = None
    rungs: bool | None = None
    seam_opening: int | None = None
    split_flat: bool = True
    parse: Literal["all", "reasoning", "none"] = "all"
    return_tokens: bool = False
    segments: list[SegmentIn] | None = None
    glue: str = "\n\n"

    def policy(self, default: Policy) -> Policy:
        """The server's own policy with the fields that were given.

        Raises:
            ConfigError: a value lies outside its range.
        """
        given = {name: value for name in POLICY if (value := getattr(self, name)) is not None}
        return default.with_(**given) if given else default


class StreamOptions(BaseModel):
    """``include_usage`` adds a last chunk with token counts; ``include_obfuscation`` changes nothing here, and
    ``continuous_usage_stats``, counts in every chunk, is told in the report's notes: they are known at the end."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class AnyRequest(BaseModel):
    """What chat and completion requests have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    prompt_cache_key: str | None = None
    hypic: HypicOptions | None = None

    @property
    def options(self) -> HypicOptions:
        return self.hypic or HypicOptions()

    @property
    def namespace(self) -> str | None:
        """Entries are shared within it only: ours, or what OpenAI's clients call the prompt cache key."""
        return self.options.namespace or self.prompt_cache_key

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def notes(self) -> Sequence[str]:
        """What is told of fields that were taken and have no effect."""
        more = self.stream and self.stream_options is not None and self.stream_options.continuous_usage_stats
        return [*unsupported.notes(self.model_extra or {}), *([unsupported.USAGE_IN_ALL] if more else [])]

    def refuse_unsupported(self) -> None:
        """Nothing that would change the answer is ignored, and no name that is not known.

        Raises:
            ApiError: 400 that names the field.
        """
        unsupported.check(self.model_extra or {}, list(type(self).model_fields), list(HypicOptions.model_fields))

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """How tokens are chosen.

        Raises:
            ConfigError: a value lies outside its range.
        """
        given = {name: value for name in (*_NUMBERS, "seed", "stop") if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # as clients of other open servers say that there is no limit
            del given["top_k"]
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=bool(self.ignore_eos), **given)


class ChatRequest(AnyRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_sampling(self, room: int) -> SamplingParams:
        """``room``: most tokens where the client names no number, as OpenAI has it."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs needs logprobs to be true.", "top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MOST_LOGPROBS:
            raise refused(
                f"top_logprobs is {self.top_logprobs}; it must be a whole number from 0 to {MOST_LOGPROBS}.",
                "top_logprobs",
            )
        return self.sampling(room if asked is None else asked, (self.top_logprobs or 0) if self.logprobs else None)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        self._refuse_empty()
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise refused(
                f"response_format is {kind!r}; this server cannot hold an answer to a format yet: ask for it in the "
                "prompt and parse the text.",
                "response_format", "unsupported_field",
            )  # fmt: skip

    def _refuse_empty(self) -> None:
        """OpenAI wants content in all messages but the model's own; empty text is content."""
        for index, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            if role in _WITH_CONTENT and (content is None or content == []):
                given = "missing" if "content" not in message else "null" if content is None else "an empty list"
                place = f"messages.{index}.content"
                raise refused(f"{place} is {given}; a message of the role {role!r} needs text or content parts.", place)

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call.

        Raises:
            ApiError: 400 for a tool that is no function, or a choice that cannot be forced on the model. Whether one
                call is wanted at a time is looked at in the answer.
        """
        tools = self.tools or []
        for index, tool in enumerate(tools):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
                raise refused(f"tools.{index} is no function with a name; only functions can be called.", "tools")
        if self.tool_choice not in (None, "auto", "none"):
            raise refused("a tool call cannot be forced on the model; set tool_choice to 'auto' or 'none'.",
                          "tool_choice", "unsupported_field")  # fmt: skip
        return [] if self.tool_choice == "none" else tools


class CompletionRequest(AnyRequest):
    """``POST /v1/completions``; a list of prompts is a batch."""

    prompt: str | list[str] | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str]:
        """The prompts of the batch, at least one; segments may stand in the place of a prompt."""
        if self.prompt is None and not (self.hypic and self.hypic.segments):
            raise refused("prompt is missing; it must be sent.", "prompt")
        if isinstance(self.prompt, list) and not self.prompt:
            raise refused("prompt is an empty list; give it at least one text.", "prompt")
        return self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]


class SegmentsRequest(BaseModel):
    """``POST /v1/hypic/segments``: texts to know and to encode; ``wait=False`` answers before they are encoded."""

    model_config = ConfigDict(extra="forbid", strict=True)

    segments: Annotated[list[SegmentIn], Field(min_length=1)]
    namespace: str | None = None
    warm: bool = True
    wait: bool = True
    hypic: HypicOptions | None = None


class TokenizeRequest(BaseModel):
    """``POST /v1/hypic/tokenize``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str
