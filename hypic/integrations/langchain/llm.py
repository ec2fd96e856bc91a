"""``HypicLLM``: a LangChain string model on a hypic engine in this process, or on a running ``hypic serve``.

Takes a ``hypic.Prompt``, a list of ``hypic.Segment``, a string, or messages; segments reach the
engine unmerged on every path, because each input becomes a ``SegmentedStr``. Answers are ``str``;
counts and the cache report are in ``generation_info`` and ``llm_output``.

LangChain's cache keys a string model's answers by the text alone, not by where segments begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from pydantic import model_validator

from hypic import __version__
from hypic.integrations._common import Request, flat_request, owned_request
from hypic.integrations._reports import token_counts
from hypic.integrations.langchain.engine import Call, langchain_errors
from hypic.integrations.langchain.messages import message_request
from hypic.integrations.langchain.options import EngineOptions
from hypic.integrations.langchain.prompts import (
    MessagesPromptValue,
    SegmentedStr,
    SegmentPromptValue,
    as_prompt,
    transcript,
)
from hypic.integrations.langchain.results import logprobs_info, response_metadata
from hypic.types import Completion

_MAX_THREADS = 64
_RUN_OPTIONS = ("callbacks", "tags", "metadata", "run_name", "run_id")


class HypicLLM(EngineOptions, BaseLLM):
    """String model whose prompt segments are computed once (once for each rung of a primer) and reused.

    ``template=False`` leaves out the chat template, for base models. Options and errors as for
    ``ChatHypic``.
    """

    template: bool = True

    @model_validator(mode="after")
    def _set_hypic_llm_version(self) -> Self:
        self._add_version("hypic", __version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "hypic"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "template": self.template}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params.setdefault("ls_model_name", self.model_name)
        return params

    def _convert_input(self, model_input: Any) -> PromptValue:
        if isinstance(model_input, (SegmentPromptValue, MessagesPromptValue)):
            return model_input
        if isinstance(model_input, SegmentedStr) and model_input.messages:
            return MessagesPromptValue(messages=list(model_input.messages))
        prompt = as_prompt(model_input)
        if prompt is not None:
            return SegmentPromptValue.of(prompt)
        value = super()._convert_input(model_input)
        return MessagesPromptValue(messages=list(value.messages)) if isinstance(value, ChatPromptValue) else value

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        return super().generate_prompt([self._convert_input(p) for p in prompts], *args, **kwargs)

    async def agenerate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        return await super().agenerate_prompt([self._convert_input(p) for p in prompts], *args, **kwargs)

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        # The base class leaves call options out of its cache keys, so they become fields first.
        bound, run_options = self._split_options(kwargs)
        return super(HypicLLM, bound).generate(prompts, stop, *args, **run_options)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        bound, run_options = self._split_options(kwargs)
        return await super(HypicLLM, bound).agenerate(prompts, stop, *args, **run_options)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self.streaming and len(prompts) == 1:
            return _flattened(list(self._stream(prompts[0], stop, run_manager, **kwargs)))
        call, requests = self._prepare(prompts, stop, kwargs)
        if len(requests) == 1:
            return _result([list(call.stream(requests[0].prompt))], call, requests)
        with ThreadPoolExecutor(min(len(requests), _MAX_THREADS)) as threads:
            answers = list(threads.map(lambda request: list(call.stream(request.prompt)), requests))
        return _result(answers, call, requests)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self.streaming and len(prompts) == 1:
            return _flattened([chunk async for chunk in self._astream(prompts[0], stop, run_manager, **kwargs)])
        call, requests = await asyncio.to_thread(self._prepare, prompts, stop, kwargs)
        tasks = [asyncio.ensure_future(_drain(call, request)) for request in requests]
        try:
            return _result(await asyncio.gather(*tasks), call, requests)
        finally:
            # When one has failed, the others would run on for nobody.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call, (request,) = self._prepare([prompt], stop, kwargs)
        with closing(call.stream(request.prompt)) as pieces:
            for piece in pieces:
                chunk = GenerationChunk(text=piece.text, generation_info=_info(piece, call, request))
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call, (request,) = await asyncio.to_thread(self._prepare, [prompt], stop, kwargs)
        async with aclosing(call.astream(request.prompt)) as pieces:
            async for piece in pieces:
                chunk = GenerationChunk(text=piece.text, generation_info=_info(piece, call, request))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _split_options(self, options: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        run_options: dict[str, Any] = {k: options[k] for k in _RUN_OPTIONS if k in options}
        return self._bound({k: v for k, v in options.items() if k not in run_options}), run_options

    def _prepare(
        self, prompts: list[str], stop: list[str] | None, options: dict[str, Any]
    ) -> tuple[Call, list[Request]]:
        bound = self._bound(options)
        call = bound._call(stop)
        with langchain_errors():
            return call, [bound._request(prompt, call) for prompt in prompts]

    def _request(self, prompt: str, call: Call) -> Request:
        known = self._known_texts(call.engine)
        if not isinstance(prompt, SegmentedStr):
            return flat_request(str(prompt), known, template=self.template)
        if prompt.prompt is None:
            messages: Sequence[BaseMessage] = prompt.messages
            return message_request(messages, known) if self.template else owned_request(transcript(messages), known)
        return owned_request(replace(prompt.prompt, template=prompt.prompt.template and self.template), known)


async def _drain(call: Call, request: Request) -> list[Completion]:
    async with aclosing(call.astream(request.prompt)) as pieces:
        return [piece async for piece in pieces]


def _info(piece: Completion, call: Call, request: Request) -> dict[str, Any] | None:
    """What stands beside the text: counts and report on the last piece only, since pieces are added up."""
    info = logprobs_info(piece.logprobs)
    if piece.reasoning:
        info["reasoning_content"] = piece.reasoning
    if piece.finish_reason is not None:
        info |= response_metadata(piece, call.model_name, request)
        info["token_usage"] = {} if piece.usage is None else token_counts(piece.usage)
    return info or None


def _result(answers: Sequence[Sequence[Completion]], call: Call, requests: Sequence[Request]) -> LLMResult:
    wholes = [Completion.join(pieces) for pieces in answers]
    generations = [
        [Generation(text=whole.text, generation_info=_info(whole, call, request))]
        for whole, request in zip(wholes, requests, strict=True)
    ]
    counts = [token_counts(whole.usage) for whole in wholes if whole.usage is not None]
    total = {name: sum(count[name] for count in counts) for name in (counts[0] if counts else ())}
    return LLMResult(generations=list(generations), llm_output={"token_usage": total, "model_name": call.model_name})


def _flattened(chunks: Sequence[GenerationChunk]) -> LLMResult:
    whole = sum(chunks[1:], chunks[0]) if chunks else GenerationChunk(text="")
    info = whole.generation_info or {}
    output: dict[str, Any] = {name: info[name] for name in ("token_usage", "model_name") if name in info}
    return LLMResult(generations=[[Generation(text=whole.text, generation_info=info)]], llm_output=output)
