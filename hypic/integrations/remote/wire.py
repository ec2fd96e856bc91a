"""Prompts as the server's JSON, and its JSON as pieces, reports and errors. Pure: nothing is sent from here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from hypic.errors import (
    ConfigError,
    HypicError,
    NonFiniteOutput,
    PromptError,
    PromptTooLong,
    RequestAborted,
    StoreFull,
    UnsupportedModel,
    WorkerLost,
)
from hypic.kept import CachedEntry, Forgotten
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

CHAT, TEXT = "/chat/completions", "/completions"
_ERRORS: Mapping[str, type[HypicError]] = {
    "context_length_exceeded": PromptTooLong,
    "store_full": StoreFull,
    "invalid_prompt": PromptError,
    "invalid_setting": ConfigError,
    "invalid_api_key": ConfigError,
    "admin_only": ConfigError,
    "unknown_host": ConfigError,
    "model_not_found": UnsupportedModel,
    "unsupported_model": UnsupportedModel,
    "non_finite_output": NonFiniteOutput,
    "request_aborted": RequestAborted,
}


def request(
    prompt: PromptLike,
    sampling: SamplingParams | None,
    policy: Policy | None,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    namespace: str | None,
) -> tuple[str, dict[str, Any]]:
    """The address of a request within the server, and its body: what the caller said and nothing less."""
    if isinstance(prompt, Prompt) and not prompt.template and prompt.namespace is not None:
        namespace = prompt.namespace
    options = {"namespace": namespace, "split_flat": False, "parse": "reasoning", "return_tokens": True}
    body: dict[str, Any] = {"stream": True, "hypic": {**options, **policy_fields(policy)}}
    settings = _sampling(sampling or SamplingParams())
    if isinstance(prompt, Prompt) and not prompt.template:
        body["hypic"] |= {"segments": [asdict(segment) for segment in prompt.segments], "glue": prompt.glue}
        return TEXT, {**body, **settings, "prompt": prompt.tail}
    if "logprobs" in settings:
        settings |= {"logprobs": True, "top_logprobs": settings["logprobs"]}
    if tools:
        body["tools"] = list(tools)
    if chat_template_kwargs:
        body["chat_template_kwargs"] = dict(chat_template_kwargs)
    return CHAT, {**body, **settings, "messages": _messages(prompt)}


class Answer:
    """Reads one stream of events, line by line."""

    def __init__(self, base_url: str) -> None:
        self._base_url, self._is_over = base_url, False

    def read(self, line: str) -> Completion | None:
        """The piece that a line brings, if any.

        Raises:
            HypicError: it brings an error.
        """
        if not line.startswith("data:") or line.strip() == "data: [DONE]":
            return None
        chunk = json.loads(line[len("data:") :])
        if "error" in chunk:
            raise error_of(chunk["error"], 500)
        piece = _piece(chunk)
        self._is_over = self._is_over or (piece is not None and piece.finish_reason is not None)
        return piece

    def check_end(self) -> None:
        """Whether the answer is whole.

        Raises:
            WorkerLost: the server broke off.
        """
        if not self._is_over:
            raise WorkerLost(f"{self._base_url} broke off in the middle of an answer; send it again.")


def content(body: Any) -> dict[str, Any]:
    """A body as JSON.

    Raises:
        PromptError: it holds something else.
    """
    if body is None:
        return {}
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise PromptError(f"the prompt cannot be sent as JSON ({error}); pass text, numbers, lists, dicts.") from error
    return {"content": text, "headers": {"content-type": "application/json"}}


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def policy_fields(policy: Policy | None) -> dict[str, Any]:
    """What a policy says. ``primed`` and ``rungs`` are left out where they are as by default: a server from before they
    were refuses fields that it does not know, and has no primer to do without."""
    told = {} if policy is None else {key: value for key, value in asdict(policy).items() if value is not None}
    return {key: value for key, value in told.items() if (key, value) not in (("primed", True), ("rungs", True))}


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """What is set, by OpenAI's names, which are ours."""
    given = {f.name: getattr(sampling, f.name) for f in fields(SamplingParams)}
    return {name: list(v) if name == "stop" else v for name, v in given.items() if v is not None and v != ()}


def _messages(prompt: PromptLike) -> list[Any]:
    """A prompt as messages whose parts say of themselves what they are."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Prompt):
        return list(prompt)
    tail = Segment(prompt.tail, "turn", namespace=prompt.namespace, cache=False)
    system = [_part(segment) for segment in prompt.segments if segment.kind == "system"]
    user = [_part(segment) for segment in (*prompt.segments, tail) if segment.kind != "system"]
    turns = [("system", system)] if system else []
    return [{"role": role, "content": parts, "glue": prompt.glue} for role, parts in (*turns, ("user", user))]


def _part(segment: Segment) -> dict[str, Any]:
    hints = {key: value for key, value in asdict(segment).items() if key != "text" and value is not None}
    return {"type": "text", "text": segment.text, "hypic": hints}


def _piece(chunk: Mapping[str, Any]) -> Completion | None:
    """A chunk of either kind; ``None`` if it says nothing."""
    choice = next(iter(chunk.get("choices") or ()), None)
    if choice is None:
        return None
    delta, ours = choice.get("delta") or {}, chunk.get("hypic") or {}
    tokens = ours.get("tokens") or {}
    reason = choice.get("finish_reason")
    piece = Completion(
        text=delta.get("content") or choice.get("text") or "",
        token_ids=tuple(tokens.get("ids") or ()),
        reasoning=delta.get("reasoning_content") or "",
        finish_reason=reason,
        logprobs=tuple(_logprob(entry) for entry in tokens.get("logprobs") or ()),
        usage=Usage(**ours["usage"]) if reason and "usage" in ours else None,
        report=report_of(ours) if reason and "segments" in ours else None,
    )
    return None if piece == Completion() else piece


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(entry["token_id"], entry["logprob"], tuple((i, value) for i, value in entry["top"]))


def _known(kind: type[CacheReport | SegmentReport | Policy], told: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: told[f.name] for f in fields(kind) if f.name in told}


def report_of(told: Mapping[str, Any]) -> CacheReport:
    """A report as the server's engine made it; fields of a newer server are left out, and one from before there were
    rungs had none."""
    known = _known(CacheReport, told)
    segments = tuple(SegmentReport(**_known(SegmentReport, segment)) for segment in known.pop("segments", ()))
    notes, used = tuple(known.pop("notes", ())), _known(Policy, known.pop("policy", {}))
    policy = Policy(**({"rungs": False, **used} if used else {}))
    return CacheReport(segments=segments, notes=notes, policy=policy, **known)


def forgotten_of(told: Mapping[str, Any]) -> Forgotten:
    """What the server forgot; counts that it does not tell are 0."""
    return Forgotten(**{f.name: int(told[f.name]) for f in fields(Forgotten) if f.name in told})


def entry_of(told: Mapping[str, Any]) -> CachedEntry:
    """One entry as the server lists it."""
    known = {f.name: told[f.name] for f in fields(CachedEntry) if f.name in told}
    labels = tuple((name, source) for name, source in known.pop("labels", ()))
    return CachedEntry(labels=labels, namespaces=tuple(known.pop("namespaces", ())), **known)


def error_of(told: Mapping[str, Any], status: int) -> HypicError:
    """The error that the server's engine raised, or the nearest to what the server says."""
    message, code = str(told["message"]), told.get("code")
    kind = _ERRORS.get(str(code))
    if kind is None:
        kind = WorkerLost if status == 429 or status >= 500 else PromptError
    return kind(message)
