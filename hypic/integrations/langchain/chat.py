"""``ChatHypic``: a LangChain chat model on a hypic engine in this process.

Streaming is the primitive; whole answers drain it. Async is the engine's own async, so a cancelled
task aborts its request. Tools and structured output are refused, never dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import model_validator

from hypic import __version__
from hypic.integrations.langchain.blocks import blocks_of
from hypic.integrations.langchain.engine import Call, langchain_errors, max_context_of
from hypic.integrations.langchain.messages import Request, message_request
from hypic.integrations.langchain.options import NO_TOOLS, EngineOptions
from hypic.integrations.langchain.prompts import SegmentedStr, SegmentPromptValue, as_prompt
from hypic.integrations.langchain.results import logprobs_info, response_metadata, token_usage, usage_metadata
from hypic.types import Completion

# Role names and separators of a chat template, per message; templates use 3 to 6 tokens.
_SCAFFOLD_TOKENS = 6


class ChatHypic(EngineOptions, BaseChatModel):
    """Chat model whose prompt segments are computed once and reused at any place.

    Every text content block is a segment or live text of its own; ``segment(...)`` makes marked
    ones. ``hypic.Prompt`` and lists of ``hypic.Segment`` are taken as inputs too. Per call:
    any sampling field, ``hypic={"reuse": "none"}`` and other policy fields, ``namespace``.

    Raises (from every call):
        ContextOverflowError: the prompt is longer than the model's context.
        ModelInvalidRequestError: a block is not text, or an option cannot be right.
        NotImplementedError: tools or a response format are asked for.
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
            "tool_calling": False,
            "structured_output": False,
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
        call, request = self._prepare(messages, stop, kwargs)
        return _result(list(call.stream(request.prompt)), call, request)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call, request = self._prepare(messages, stop, kwargs)
        async with aclosing(call.astream(request.prompt)) as pieces:
            return _result([piece async for piece in pieces], call, request)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call, request = self._prepare(messages, stop, kwargs)
        with closing(call.stream(request.prompt)) as pieces:
            for piece in pieces:
                if _says_something(piece):
                    yield _chunk(piece, call, request)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call, request = self._prepare(messages, stop, kwargs)
        async with aclosing(call.astream(request.prompt)) as pieces:
            async for piece in pieces:
                if _says_something(piece):
                    yield _chunk(piece, call, request)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Not in this version.

        Raises:
            NotImplementedError: always, before anything is computed.
        """
        raise NotImplementedError(NO_TOOLS)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the blocks as the engine encodes them, and 6 per message for the template's own."""
        if tools:
            raise NotImplementedError(NO_TOOLS)
        texts = [block.text for message in messages for block in blocks_of(message)]
        return sum(self.get_num_tokens(text) for text in texts) + _SCAFFOLD_TOKENS * len(messages)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> tuple[Call, Request]:
        bound = self._bound(options)
        call = bound._call(stop)
        with langchain_errors():
            return call, message_request(messages, bound._known_texts(call.engine))


def _says_something(piece: Completion) -> bool:
    return bool(piece.text or piece.reasoning or piece.logprobs or piece.finish_reason)


def _extra(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning} if reasoning else {}


def _chunk(piece: Completion, call: Call, request: Request) -> ChatGenerationChunk:
    message = AIMessageChunk(content=piece.text, additional_kwargs=_extra(piece.reasoning))
    if piece.finish_reason is not None:
        # Once per answer: LangChain adds up what several chunks carry.
        message.chunk_position = "last"
        message.usage_metadata = None if piece.usage is None else usage_metadata(piece.usage)
        message.response_metadata = response_metadata(piece, call.model_name, request)
    return ChatGenerationChunk(message=message, generation_info=logprobs_info(piece.logprobs) or None)


def _result(pieces: list[Completion], call: Call, request: Request) -> ChatResult:
    whole = Completion.join(pieces)
    message = AIMessage(
        content=whole.text,
        additional_kwargs=_extra(whole.reasoning),
        usage_metadata=None if whole.usage is None else usage_metadata(whole.usage),
        response_metadata=response_metadata(whole, call.model_name, request),
    )
    generation = ChatGeneration(message=message, generation_info=logprobs_info(whole.logprobs) or None)
    output = {"model_name": call.model_name, "token_usage": {} if whole.usage is None else token_usage(whole.usage)}
    return ChatResult(generations=[generation], llm_output=output)
