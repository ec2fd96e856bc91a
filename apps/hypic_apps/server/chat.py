"""``POST /v1/chat/completions``: content parts are segments; reasoning and tool calls are read out of the text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from hypic.tool_calls import Part, Reply, ReplyParser, ToolCall, only_first
from hypic.types import Completion
from hypic_apps.server.answers import Answers, Ask, attended
from hypic_apps.server.prompts import Reader, Scope
from hypic_apps.server.schemas import ChatRequest
from hypic_apps.server.service import Service, service_of
from hypic_apps.server.sse import Events, EventStream
from hypic_apps.server.wire import Envelope, chat_logprobs, report_of, tokens_of, usage_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation, as one object or as a stream of chunks."""
    service = service_of(request)
    service.check_model(body.model)
    body.refuse_unsupported()
    chat = await _Chat.of(service, body, request.state.tenant)
    answers = Answers(service, chat.ask)
    try:
        if body.stream:
            await attended(request.receive, answers.wait(service.settings.keep_alive_s))
            return EventStream(chat.events(answers), answers.aclose)
        (whole,) = await attended(request.receive, answers.all())
    except BaseException:
        await answers.aclose()
        raise
    return JSONResponse(chat.whole(whole))


@dataclass
class _Chat:
    """One conversation being answered."""

    service: Service
    body: ChatRequest
    ask: Ask
    reader: Reader
    parser: ReplyParser | None
    notes: list[str] = field(default_factory=list)
    reasoning: str = ""
    num_calls: int = 0

    @classmethod
    async def of(cls, service: Service, body: ChatRequest, tenant: str | None) -> _Chat:
        """Reads a request.

        Raises:
            ApiError, HypicError: something about it cannot be right.
        """
        engine, options = service.engine, body.options
        policy = options.policy(engine.config.policy)
        splits = options.split_flat and policy.reuse == "segments"
        reader = Reader(Scope(tenant, body.namespace), engine.registry if splits else None)
        tools, kwargs = body.offered_tools(), body.chat_template_kwargs
        await service.check_tools(tools, kwargs)
        parser = None
        if options.parse != "none":
            parser = ReplyParser(
                tools if options.parse == "all" else None, in_reasoning=await service.opens_reasoning(kwargs)
            )
        sampling = body.chat_sampling(engine.max_context)
        messages = await asyncio.to_thread(reader.messages, body.messages)
        ask = Ask([messages], sampling, policy, tools or None, kwargs)
        return cls(service, body, ask, reader, parser, [*body.notes])

    def whole(self, whole: Completion) -> dict[str, Any]:
        """The answer as one object."""
        reply = Reply.of(self._read(whole))
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
        if not reply.calls:
            message["content"] = reply.content
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [{**_call_head(), "function": _function(call)} for call in reply.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": self._finish_reason(whole),
        }
        envelope = Envelope.of(self.service, "chatcmpl", "chat.completion")
        hypic = {**self._report(whole), **self._tokens(whole)}
        return envelope.around([choice], usage=usage_of([whole.usage], self._reasoning_tokens()), hypic=hypic)

    async def events(self, answers: Answers) -> Events:
        """The answer as chunks; ``None`` when nothing came for a while."""
        envelope = Envelope.of(self.service, "chatcmpl", "chat.completion.chunk")
        more: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        last = Completion()
        yield envelope.around([_choice({"role": "assistant", "content": ""})], **more)
        while not answers.is_over:
            if not await answers.wait(self.service.settings.keep_alive_s):
                yield None
                continue
            _, last = answers.take()
            for choice, extra in self._choices(last):
                yield envelope.around([choice], **more, **extra)
        if self.body.wants_usage:
            yield envelope.around([], usage=usage_of([last.usage], self._reasoning_tokens()))

    def _choices(self, piece: Completion) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What one piece says: choices of as many chunks, each with what stands beside it."""
        choices = [_choice(delta) for part in self._read(piece) for delta in _deltas(part)]
        tokens, logprobs = self._tokens(piece), self._logprobs(piece)
        if piece.finish_reason is not None:
            choices.append({**_choice({}), "finish_reason": self._finish_reason(piece)})
        elif not choices and (tokens or logprobs):
            choices.append(_choice({}))
        extras: list[dict[str, Any]] = [{} for _ in choices]
        if choices and logprobs:
            choices[0]["logprobs"] = logprobs
        if choices and tokens:
            extras[0] = {"hypic": tokens}
        if piece.finish_reason is not None:
            extras[-1] = {"hypic": {**self._report(piece), **extras[-1].get("hypic", {})}}
        return list(zip(choices, extras, strict=True))

    def _read(self, piece: Completion) -> list[Part]:
        """Reasoning, content and calls of a piece."""
        parts = [Part(reasoning=piece.reasoning)] if piece.reasoning else []
        if self.parser is None:
            return [*parts, Part(piece.text)] if piece.text else parts
        parts += self.parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self.parser.finish()
        if self.body.parallel_tool_calls is False:
            parts = [only_first(part) for part in parts]
        self.reasoning += "".join(part.reasoning for part in parts)
        self.notes += [part.note for part in parts if part.note]
        self.num_calls += sum(part.call is not None for part in parts)
        return parts

    def _reasoning_tokens(self) -> int:
        """Tokens of what was read as reasoning, counted by encoding it again."""
        return len(self.service.engine.tokenize(self.reasoning)) if self.reasoning else 0

    def _finish_reason(self, last: Completion) -> str:
        if self.num_calls and last.finish_reason == "stop":
            return "tool_calls"
        return "length" if last.finish_reason == "length" else "stop"

    def _report(self, last: Completion) -> dict[str, Any]:
        return report_of(last, self.notes, self.reader.split, self.reader.scope.tenant)

    def _tokens(self, piece: Completion) -> dict[str, Any]:
        return tokens_of(piece) if self.body.options.return_tokens and piece.token_ids else {}

    def _logprobs(self, piece: Completion) -> dict[str, Any] | None:
        return chat_logprobs(piece.logprobs, self.service.engine.tokenizer) if self.body.logprobs else None


def _choice(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}


def _deltas(part: Part) -> Sequence[dict[str, Any]]:
    """A call comes in two: clients expect its arguments to stream behind its name."""
    if part.call is not None:
        index, name = part.call.index, part.call.name
        opened = {"index": index, **_call_head(), "function": {"name": name, "arguments": ""}}
        filled = {"index": index, "function": {"arguments": part.call.arguments_json}}
        return [{"tool_calls": [opened]}, {"tool_calls": [filled]}]
    if part.reasoning:
        return [{"reasoning_content": part.reasoning}]
    return [{"content": part.content}] if part.content else []


def _call_head() -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments_json}
