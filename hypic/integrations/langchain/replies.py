"""An engine's stream of text as LangChain's messages: content, reasoning, tool calls, usage.

Reasoning stands under ``additional_kwargs["reasoning_content"]``, from where ``content_blocks`` takes it. A call comes
as one chunk, once it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, AIMessageChunk, ToolCallChunk
from langchain_core.messages import ToolCall as LangChainCall
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from hypic.integrations._common import Request
from hypic.integrations._reports import token_counts
from hypic.integrations.langchain.engine import Call
from hypic.integrations.langchain.results import logprobs_info, response_metadata, usage_metadata
from hypic.integrations.langchain.tools import Wanted
from hypic.tool_calls import Part, Reply, ReplyParser, ToolCall, only_first
from hypic.types import Completion


class Reader:
    """Reads one answer; ``Wanted`` says which tools its calls may name and what it must be."""

    def __init__(self, call: Call, request: Request, wanted: Wanted, *, in_reasoning: bool) -> None:
        self._call, self._request, self._wanted = call, request, wanted
        self._parser = ReplyParser(wanted.tools, in_reasoning=in_reasoning)
        self._parts: list[Part] = []

    def chunk(self, piece: Completion) -> ChatGenerationChunk | None:
        """The next piece as a chunk; ``None`` when it says nothing yet.

        Raises:
            ModelError: it is the last one, and the answer is not what was asked for.
        """
        new = Reply.of(self._read(piece))
        is_last = piece.finish_reason is not None
        if not (new.content or new.reasoning or new.calls or piece.logprobs or is_last):
            return None
        message = AIMessageChunk(
            content=new.content,
            additional_kwargs=_extra(new.reasoning),
            tool_call_chunks=[_call_chunk(call) for call in new.calls],
        )
        if is_last:
            whole = self._whole(piece)
            # Once per answer: LangChain adds up what several chunks carry.
            message.chunk_position = "last"
            message.usage_metadata = None if piece.usage is None else usage_metadata(piece.usage)
            message.response_metadata = self._metadata(piece, whole)
        return ChatGenerationChunk(message=message, generation_info=logprobs_info(piece.logprobs) or None)

    def result(self, pieces: Sequence[Completion]) -> ChatResult:
        """All pieces as one message.

        Raises:
            ModelError: the answer is not what was asked for.
        """
        for piece in pieces:
            self._read(piece)
        joined = Completion.join(pieces)
        whole = self._whole(joined)
        message = AIMessage(
            content=whole.content,
            additional_kwargs=_extra(whole.reasoning),
            tool_calls=[LangChainCall(name=c.name, args=dict(c.arguments), id=_new_id()) for c in whole.calls],
            usage_metadata=None if joined.usage is None else usage_metadata(joined.usage),
            response_metadata=self._metadata(joined, whole),
        )
        generation = ChatGeneration(message=message, generation_info=logprobs_info(joined.logprobs) or None)
        usage = {} if joined.usage is None else token_counts(joined.usage)
        return ChatResult(
            generations=[generation], llm_output={"model_name": self._call.model_name, "token_usage": usage}
        )

    def _read(self, piece: Completion) -> list[Part]:
        parts = [Part(reasoning=piece.reasoning)] if piece.reasoning else []
        parts += self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.finish()
        if self._wanted.one_call:
            parts = [only_first(part) for part in parts]
        self._parts += parts
        return parts

    def _whole(self, last: Completion) -> Reply:
        whole = Reply.of(self._parts)
        self._wanted.check(whole, last.finish_reason)
        return whole

    def _metadata(self, last: Completion, whole: Reply) -> dict[str, Any]:
        metadata = response_metadata(last, self._call.model_name, self._request, whole.notes)
        if whole.calls and last.finish_reason == "stop":
            metadata["finish_reason"] = "tool_calls"
        return metadata


def _new_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def _extra(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning} if reasoning else {}


def _call_chunk(call: ToolCall) -> ToolCallChunk:
    return ToolCallChunk(
        name=call.name, args=call.arguments_json, id=_new_id(), index=call.index, type="tool_call_chunk"
    )
