"""What came back, in OpenAI's words: usage, log probabilities, and our report under ``hypic``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hypic.tool_calls import ChatTokenizer
from hypic.types import CacheReport, Completion, TokenLogprob, Usage
from hypic_apps.server.service import Service


@dataclass(frozen=True)
class Envelope:
    """The fields around the choices that all chunks of one answer share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, service: Service, prefix: str, object: str) -> Envelope:
        fingerprint = f"hypic-{service.engine.fingerprint[:16]}"
        return cls(f"{prefix}-{uuid.uuid4().hex}", object, int(time.time()), service.model_name, fingerprint)

    def around(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {**asdict(self), "choices": list(choices), **more}


def usage_of(usages: Sequence[Usage | None], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts, added up over a batch; of the prompt, what was not computed again and what was newly stored."""
    known = [usage for usage in usages if usage is not None]
    prompt, answer = sum(u.prompt_tokens for u in known), sum(u.completion_tokens for u in known)
    created = sum(max(0, min(u.created_tokens, u.prompt_tokens - u.cached_tokens)) for u in known)
    details = {"cached_tokens": sum(u.cached_tokens for u in known), "cache_write_tokens": created}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": min(reasoning_tokens, answer)},
    }


def report_of(last: Completion, notes: Sequence[str], split: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """All that the last piece of an answer tells a tenant, and ``split`` where a flat prompt was cut."""
    report = told_to(tenant, last.report or CacheReport())
    found = {"split": split} if split else {}
    usage = {} if last.usage is None else {"usage": asdict(last.usage)}
    return {**asdict(report), "notes": [*report.notes, *notes], **usage, **found}


def told_to(tenant: str | None, report: CacheReport) -> CacheReport:
    """A report without what would tell a tenant that another one has passed the same text."""
    if tenant is None:
        return report
    segments = [replace(s, reason="first time") if s.reason == "other namespace" else s for s in report.segments]
    return replace(report, segments=tuple(segments))


def tokens_of(piece: Completion) -> dict[str, Any]:
    """Ids and log probabilities as the engine has them, for clients that asked for tokens."""
    return {"tokens": {"ids": piece.token_ids, "logprobs": [asdict(entry) for entry in piece.logprobs]}}


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: ChatTokenizer) -> dict[str, Any] | None:
    """Log probabilities as chat answers have them; ``None`` where there are none."""
    if not entries:
        return None
    content = [
        {**_token(e.token_id, e.logprob, vocabulary), "top_logprobs": [_token(*top, vocabulary) for top in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob], vocabulary: ChatTokenizer, offset: int) -> dict[str, Any] | None:
    """Log probabilities as text completions have them; ``offset`` counts the characters before these tokens."""
    if not entries:
        return None
    tokens = [vocabulary.decode([entry.token_id]) for entry in entries]
    offsets = [offset + sum(map(len, tokens[:n])) for n in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{vocabulary.decode([i]): logprob for i, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _token(token_id: int, logprob: float, vocabulary: ChatTokenizer) -> dict[str, Any]:
    text = vocabulary.decode([token_id])
    # A token that is a part of a character has no text of its own, and its bytes cannot be read off it.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
