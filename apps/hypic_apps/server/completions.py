"""``POST /v1/completions``: prompts without a chat template, one or a batch; segments stand under ``hypic``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from hypic.types import Completion
from hypic_apps.server.answers import Answers, Ask, attended
from hypic_apps.server.prompts import Reader, Scope
from hypic_apps.server.schemas import CompletionRequest
from hypic_apps.server.service import Service, service_of
from hypic_apps.server.sse import Events, EventStream
from hypic_apps.server.wire import Envelope, report_of, text_logprobs, tokens_of, usage_of

router = APIRouter()
# OpenAI's own for this endpoint.
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues texts, as one object or as a stream of chunks."""
    service = service_of(request)
    service.check_model(body.model)
    body.refuse_unsupported()
    batch = await asyncio.to_thread(_Batch.of, service, body, request.state.tenant)
    answers = Answers(service, batch.ask)
    try:
        if body.stream:
            await attended(request.receive, answers.wait(service.settings.keep_alive_s))
            return EventStream(batch.events(answers), answers.aclose)
        wholes = await attended(request.receive, answers.all())
    except BaseException:
        await answers.aclose()
        raise
    return JSONResponse(batch.whole(wholes))


@dataclass
class _Batch:
    """The prompts of one request being answered; ``num_chars`` of each have been sent."""

    service: Service
    body: CompletionRequest
    ask: Ask
    readers: list[Reader]
    num_chars: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_chars = [0] * len(self.readers)

    @classmethod
    def of(cls, service: Service, body: CompletionRequest, tenant: str | None) -> _Batch:
        """Reads a request.

        Raises:
            ApiError, HypicError: something about it cannot be right.
        """
        options, registry = body.options, service.engine.registry
        policy = options.policy(service.engine.config.policy)
        splits = options.split_flat and policy.reuse == "segments"
        scope, given = Scope(tenant, body.namespace), options.segments or []
        readers = [Reader(scope, registry if splits else None) for _ in body.prompts]
        texts = zip(readers, body.prompts, strict=True)
        prompts = [reader.prompt(text, n, given, options.glue) for n, (reader, text) in enumerate(texts)]
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return cls(service, body, Ask(prompts, body.sampling(max_tokens, body.logprobs), policy), readers)

    def whole(self, wholes: list[Completion]) -> dict[str, Any]:
        """All answers as one object."""
        choices = [{**self._choice(n, one), "finish_reason": _finish_reason(one)} for n, one in enumerate(wholes)]
        envelope = Envelope.of(self.service, "cmpl", "text_completion")
        reports = [{**self._report(n, one), **self._tokens(one)} for n, one in enumerate(wholes)]
        hypic = reports[0] if len(reports) == 1 else {"prompts": reports}
        return envelope.around(choices, usage=usage_of([one.usage for one in wholes]), hypic=hypic)

    async def events(self, answers: Answers) -> Events:
        """Chunks of all answers as they come; ``None`` when nothing came for a while."""
        envelope = Envelope.of(self.service, "cmpl", "text_completion")
        more: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        usages = []
        while not answers.is_over:
            if not await answers.wait(self.service.settings.keep_alive_s):
                yield None
                continue
            index, piece = answers.take()
            hypic = self._tokens(piece)
            if piece.finish_reason is not None:
                usages.append(piece.usage)
                hypic = {**self._report(index, piece), **hypic}
            if piece.text or hypic or piece.logprobs:
                choice = {**self._choice(index, piece), "finish_reason": _finish_reason(piece)}
                yield envelope.around([choice], **more, **({"hypic": hypic} if hypic else {}))
        if self.body.wants_usage:
            yield envelope.around([], usage=usage_of(usages))

    def _choice(self, index: int, piece: Completion) -> dict[str, Any]:
        logprobs = text_logprobs(piece.logprobs, self.service.engine.tokenizer, self.num_chars[index])
        self.num_chars[index] += len(piece.text)
        return {"index": index, "text": piece.text, "logprobs": logprobs}

    def _report(self, index: int, last: Completion) -> dict[str, Any]:
        reader = self.readers[index]
        return report_of(last, self.body.notes, reader.split, reader.scope.tenant)

    def _tokens(self, piece: Completion) -> dict[str, Any]:
        return tokens_of(piece) if self.body.options.return_tokens and piece.token_ids else {}


def _finish_reason(piece: Completion) -> str | None:
    return "stop" if piece.finish_reason == "abort" else piece.finish_reason
