"""``HypicLLM``: a LlamaIndex model on a hypic engine in this process, with all nine chat and complete methods.

Chat keeps every text block of every message apart, as a segment or as live text; a completion is one user turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools import BaseTool

from hypic.integrations._common import Request, flat_request
from hypic.integrations.llamaindex.calls import Call
from hypic.integrations.llamaindex.messages import message_request
from hypic.integrations.llamaindex.options import EngineOptions
from hypic.integrations.llamaindex.responses import as_completion
from hypic.integrations.llamaindex.tools import NoToolCall, only_first_call

logger = logging.getLogger("hypic")


class HypicLLM(EngineOptions):
    """A model whose prompt segments are computed once (once for each rung of a primer) and reused.

    Per call: any sampling field, ``policy`` or ``hypic={"reuse": "none"}`` for fields of it, ``namespace``,
    ``split_flat``, ``chat_template_kwargs``, ``tools`` (functions, or OpenAI's dictionaries) and ``tool_choice``. A
    tool choice that demands a call is checked when the answer is there; decoding itself is not constrained.

    Raises (from every call):
        PromptError: a block is not text, a message cannot be read, or the prompt is too long (``PromptTooLong``).
        ConfigError: an option cannot be right, or the model's chat template shows no tools.
        NoToolCall: a call of a tool was demanded and did not come.
    """

    @classmethod
    def class_name(cls) -> str:
        return "Hypic_LLM"

    # -- chat --------------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The answer to messages."""
        call, request = self._chat_request(messages, kwargs)
        return call.answer(request)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The answer as it grows. Closing the stream, or dropping it, frees all that the request holds."""
        call, request = self._chat_request(messages, kwargs)
        return call.stream(request, lambda response: response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """``chat`` for event loops; cancelling the task aborts the request."""
        call, request = await asyncio.to_thread(self._chat_request, messages, kwargs)
        return await call.aanswer(request)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """``stream_chat`` for event loops."""
        call, request = await asyncio.to_thread(self._chat_request, messages, kwargs)
        return call.astream(request, lambda response: response)

    # -- completion --------------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to a string as one user turn; ``formatted``: it goes in as it is, without the chat template.

        Control tokens that are spelled in it stay text.
        """
        call, request = self._flat_request(prompt, formatted, kwargs)
        return as_completion(call.answer(request))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """``complete`` as it grows."""
        call, request = self._flat_request(prompt, formatted, kwargs)
        return call.stream(request, as_completion)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """``complete`` for event loops; cancelling the task aborts the request."""
        call, request = await asyncio.to_thread(self._flat_request, prompt, formatted, kwargs)
        return as_completion(await call.aanswer(request))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """``stream_complete`` for event loops."""
        call, request = await asyncio.to_thread(self._flat_request, prompt, formatted, kwargs)
        return call.astream(request, as_completion)

    # -- tools -------------------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        asked = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([asked] if asked is not None else [])]
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required and tools else None)
        offered = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        return {"messages": messages, "tools": offered, "tool_choice": choice, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        if not allow_parallel_tool_calls:
            response.message = only_first_call(response.message)
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of an answer.

        Raises:
            NoToolCall: there is none and ``error_on_no_tool_call``.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise NoToolCall(f"{self.model_name} called no tool; it said {response.message.content!r:.80}.")
        return [
            ToolSelection(tool_id=c.tool_call_id or "", tool_name=c.tool_name, tool_kwargs=c.tool_kwargs)  # type: ignore[arg-type]
            for c in calls
        ]

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _chat_request(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> tuple[Call, Request]:
        call = self._call(options)
        request = message_request(call.wanted.ask(messages), self._known_texts(call.engine, options))
        self._tell(request)
        return call, request

    def _flat_request(self, prompt: str, formatted: bool, options: Mapping[str, Any]) -> tuple[Call, Request]:
        own = self.completion_to_prompt
        if not formatted and own is not None and own is not default_completion_to_prompt:
            prompt, formatted = own(prompt), True
        call = self._call(options, template=not formatted)
        request = flat_request(prompt, self._known_texts(call.engine, options), template=not formatted)
        self._tell(request)
        return call, request

    def _tell(self, request: Request) -> None:
        """Once per model: flat text had to be searched."""
        if request.found and not self._has_told:
            self._has_told.append("split")
            logger.warning(
                "%d known texts were found in a flat prompt and reused; SegmentSynthesizer of "
                "hypic.integrations.llamaindex passes retrieved nodes unmerged, so that none has to be searched for.",
                len(request.found),
            )
