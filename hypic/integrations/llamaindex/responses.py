"""What came back, in LlamaIndex's words: messages that grow, deltas, usage and report in ``raw``.

Reasoning is a ``ThinkingBlock`` before the text (its news under ``additional_kwargs["thinking_delta"]``), tool calls
are ``ToolCallBlock`` s behind it. Only the last response of a stream has ``raw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from hypic.integrations._common import Request
from hypic.integrations._reports import hypic_report, token_counts
from hypic.tool_calls import Part, ReplyParser
from hypic.types import Completion, TokenLogprob


class Answer:
    """One answer as it grows, from the engine's pieces."""

    def __init__(self, parser: ReplyParser, model_name: str, request: Request) -> None:
        self._parser, self._model_name, self._request = parser, model_name, request
        self._content = self._reasoning = ""
        self._notes: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self.calls: list[ToolCallBlock] = []
        self.finish_reason: str | None = None

    def take(self, piece: Completion) -> ChatResponse | None:
        """The response as of now; ``None`` while nothing is new."""
        self.finish_reason = piece.finish_reason
        is_last = piece.finish_reason is not None
        parts = self._parser.push(piece.text) + (self._parser.finish() if is_last else [])
        content, reasoning = "".join(p.content for p in parts), piece.reasoning + "".join(p.reasoning for p in parts)
        self._content, self._reasoning = self._content + content, self._reasoning + reasoning
        self._logprobs += piece.logprobs
        num_calls = len(self.calls)
        self._see(parts)
        if not (is_last or content or reasoning or len(self.calls) > num_calls):
            return None
        extra: dict[str, Any] = {"thinking_delta": reasoning} if reasoning else {}
        response = ChatResponse(message=self._message(), delta=content, additional_kwargs=extra)
        return self._finished(response, piece) if is_last else response

    def _see(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.note:
                self._notes.append(part.note)
            if part.call is not None:
                arguments = dict(part.call.arguments)
                call_id = f"call_{uuid4().hex[:24]}"
                self.calls.append(ToolCallBlock(tool_call_id=call_id, tool_name=part.call.name, tool_kwargs=arguments))

    def _message(self) -> ChatMessage:
        blocks: list[ContentBlock] = [ThinkingBlock(content=self._reasoning)] if self._reasoning else []
        if self._content or not self.calls:
            blocks.append(TextBlock(text=self._content))
        # LlamaIndex looks here to tell whether a streamed object comes as a tool call.
        extra = {"tool_calls": [_as_openai(call) for call in self.calls]} if self.calls else {}
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=[*blocks, *self.calls], additional_kwargs=extra)

    def _finished(self, response: ChatResponse, last: Completion) -> ChatResponse:
        counts = {} if last.usage is None else token_counts(last.usage)
        raw: dict[str, Any] = {"model": self._model_name, "finish_reason": last.finish_reason, "usage": counts}
        report = hypic_report(last.report, self._request, self._notes)
        if report:
            raw["hypic"] = report
        if self._logprobs:
            raw["logprobs"] = {"content": [asdict(entry) for entry in self._logprobs]}
        response.raw = raw
        response.additional_kwargs.update(counts)
        return response


def whole(responses: Sequence[ChatResponse]) -> ChatResponse:
    """The last response of a stream as an answer by itself."""
    last = responses[-1]
    extra = {key: value for key, value in last.additional_kwargs.items() if key != "thinking_delta"}
    return ChatResponse(message=last.message, raw=last.raw, additional_kwargs=extra)


def as_completion(response: ChatResponse) -> CompletionResponse:
    """The same answer to a string."""
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def _as_openai(call: ToolCallBlock) -> dict[str, Any]:
    function = {"name": call.tool_name, "arguments": call.tool_kwargs}
    return {"type": "function", "id": call.tool_call_id, "function": function}
