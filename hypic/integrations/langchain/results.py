"""What came back, in LangChain's words: usage, response metadata and generation info.

``usage_metadata`` holds only the keys that LangChain adds up; everything else that is known about
a request (per-segment outcome, counts, policy) stands under ``response_metadata["hypic"]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from hypic.integrations.langchain.messages import Request
from hypic.registry import POLICY_NAME
from hypic.types import CacheReport, Completion, TokenLogprob, Usage


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Token counts; of the input, ``cache_read`` was not computed again and ``cache_creation`` was newly stored."""
    created = max(0, min(usage.created_tokens, usage.prompt_tokens - usage.cached_tokens))
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens, cache_creation=created),
    )


def token_usage(usage: Usage) -> dict[str, int]:
    """Token counts as string models report them; these can be added up over prompts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def response_metadata(last: Completion, model_name: str, request: Request) -> dict[str, Any]:
    """All that the last piece of an answer tells beside its text and usage."""
    metadata: dict[str, Any] = {"model_name": model_name, "model_provider": "hypic"}
    if last.finish_reason is not None:
        metadata["finish_reason"] = last.finish_reason
    hypic = {**_report(last.report, request.notes), **_found(request)}
    return {**metadata, "hypic": hypic} if hypic else metadata


def logprobs_info(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities of the chosen tokens; lists of successive pieces are joined by LangChain."""
    return {"logprobs": {"content": [asdict(entry) for entry in logprobs]}} if logprobs else {}


def _report(report: CacheReport | None, notes: Sequence[str]) -> dict[str, Any]:
    if report is None:
        return {}
    return {
        "mode": report.policy.reuse,
        "segments": [asdict(segment) for segment in report.segments],
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "reused_tokens": report.reused_tokens,
        "times_s": dict(report.times_s),
        "policy": asdict(report.policy),
        "fingerprint": report.fingerprint,
        "version": report.version,
        "notes": [*report.notes, *notes],
    }


def _found(request: Request) -> dict[str, Any]:
    if not request.found:
        return {}
    return {"split": {"policy": POLICY_NAME, "found": [asdict(found) for found in request.found]}}
