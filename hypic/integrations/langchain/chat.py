"""``ChatHypic``: a LangChain chat model on a hypic engine in this process, or on a running ``hypic serve``.

Streaming is the primitive; whole answers drain it. Async is the engine's own async, so a cancelled
task aborts its request. What is asked of an answer's form is ``tools``' matter, reading it ``replies``'.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, model_validator

from hypic import __version__
from hypic.integrations._common import Request, max_context_of
from hypic.integrations._options import check_call
from hypic.integrations.langchain.blocks import blocks_of
from hypic.integrations.langchain.engine import Call, langchain_errors
from hypic.integrations.langchain.messages import message_request
from hypic.integrations.langchain.options import EngineOptions
from hypic.integrations.langchain.prompts import SegmentedStr, SegmentPromptValue, as_prompt
from hypic.integrations.langchain.replies import Reader
from hypic.integrations.langchain.structured import StructuredMethod, structured
from hypic.integrations.langchain.tools import (
    TOOL_OPTIONS,
    Wanted,
    normalized_choice,
    opens_reasoning,
    refuse_mute_template,
)

# Role names and separators of a chat template, per message; templates use 3 to 6 tokens.
_SCAFFOLD_TOKENS = 6


class ChatHypic(EngineOptions, BaseChatModel):
    """Chat model whose prompt segments are computed once (once for each rung of a primer) and reused.

    Every text content block is a segment or live text of its own; ``segment(...)`` makes marked
    ones. ``hypic.Prompt`` and lists of ``hypic.Segment`` are taken as inputs too. Per call:
    any sampling field, ``hypic={"reuse": "none"}`` and other policy fields, ``namespace``.

    Raises (from every call):
        ContextOverflowError: the prompt is longer than the model's context.
        ModelInvalidRequestError: a block is not text, or an option cannot be right.
        ModelError: the answer makes no call although ``tool_choice`` asks for one.
        NotImplementedError: something is asked for that would need constrained decoding, or tools of a checkpoint
            whose chat template does not show them.
    """

    @model_validator(mode="after")
    def _set_hypic_chat_version(self) -> Self:
        self._add_version("hypic", __version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "chat-hypic"

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile: ModelProfile = {
            "text_inputs": True,
            "text_outputs": True,
            "image_inputs": False,
            "tool_calling": True,
            "tool_choice": True,
            "structured_output": False,
            "reasoning_output": True,
        }
        length = None if self.engine is None else max_context_of(self.engine)
        if length is not None:
            profile["max_input_tokens"] = length
        return profile

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params.setdefault("ls_model_name", self.model_name)
        return params

    def _convert_input(self, model_input: Any) -> PromptValue:
        if isinstance(model_input, SegmentedStr) and model_input.messages:
            return super()._convert_input(list(model_input.messages))
        prompt = as_prompt(model_input)
        if prompt is None:
            return super()._convert_input(model_input)
        if not prompt.template:
            raise ModelInvalidRequestError("template=False is for HypicLLM; a chat model always applies its template.")
        return SegmentPromptValue.of(prompt)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, request, reader = self._prepare(messages, stop, kwargs)
        return reader.result(list(call.stream(request.prompt)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, request, reader = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
        async with aclosing(call.astream(request.prompt)) as pieces:
            return reader.result([piece async for piece in pieces])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call, request, reader = self._prepare(messages, stop, kwargs)
        with closing(call.stream(request.prompt)) as pieces:
            for piece in pieces:
                chunk = reader.chunk(piece)
                if chunk is not None:
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call, request, reader = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
        async with aclosing(call.astream(request.prompt)) as pieces:
            async for piece in pieces:
                chunk = reader.chunk(piece)
                if chunk is not None:
                    yield chunk

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools that it may call: ``AIMessage.tool_calls``.

        ``tool_choice``: ``"auto"`` (as without), ``"none"`` (tools are kept from the model), ``"any"`` or
        ``"required"``, or a tool's name. The last three are asked for in the system text and checked: an answer
        without such a call raises. With ``parallel_tool_calls=False`` of several calls the first is given, and a note
        in ``response_metadata`` tells of the others.

        Raises:
            NotImplementedError: ``strict=True``, which needs constrained decoding.
            ModelInvalidRequestError: ``tool_choice`` names no tool, or a tool is a provider's own.
        """
        options: dict[str, Any] = {"tools": [convert_to_openai_tool(tool) for tool in tools]} if tools else {}
        if tool_choice is not None:
            options["tool_choice"] = normalized_choice(tool_choice)
        Wanted.of({**kwargs, **options})
        return self.bind(**options, **{key: value for key, value in kwargs.items() if value is not None})

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: StructuredMethod = "function_calling",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers as objects of ``schema``, asked for in the prompt and checked afterwards.

        ``method``: a tool that the model must call, or JSON text (``json_schema`` puts the schema into the prompt,
        ``json_mode`` leaves that to you; both work with every chat template).

        With ``strict=True``, which needs constrained decoding, every call raises ``NotImplementedError``.

        Raises:
            ValueError: another method or keyword.
        """
        if kwargs:
            raise ValueError(f"unknown option {next(iter(kwargs))!r}; known are include_raw, method and strict.")
        return structured(self, schema, method, include_raw, strict=bool(strict))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the blocks as the engine encodes them, tools as JSON, and 6 per message for the template's own."""
        texts = [block.text for message in messages for block in blocks_of(message)]
        texts += [json.dumps(convert_to_openai_tool(tool)) for tool in tools or ()]
        return sum(self.get_num_tokens(text) for text in texts) + _SCAFFOLD_TOKENS * len(messages)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> tuple[Call, Request, Reader]:
        with langchain_errors():
            check_call(options)
        wanted = Wanted.of(options)
        bound = self._bound({name: value for name, value in options.items() if name not in TOOL_OPTIONS})
        call = replace(bound._call(stop), tools=wanted.tools)
        with langchain_errors():
            refuse_mute_template(call.engine, wanted, call.chat_template_kwargs)
            request = message_request(wanted.ask(messages), bound._known_texts(call.engine))
            in_reasoning = opens_reasoning(call.engine, call.chat_template_kwargs)
        return call, request, Reader(call, request, wanted, in_reasoning=in_reasoning)
