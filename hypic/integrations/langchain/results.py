"""What came back, in LangChain's words: usage, response metadata and generation info.

``usage_metadata`` holds only the keys that LangChain adds up; everything else that is known about
a request (per-segment outcome, counts, policy) stands under ``response_metadata["hypic"]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from hypic.integrations._common import Request
from hypic.integrations._reports import hypic_report
from hypic.types import Completion, TokenLogprob, Usage


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Token counts; of the input, ``cache_read`` was not computed again and ``cache_creation`` was newly stored."""
    created = max(0, min(usage.created_tokens, usage.prompt_tokens - usage.cached_tokens))
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens, cache_creation=created),
    )


def response_metadata(last: Completion, model_name: str, request: Request, notes: Sequence[str] = ()) -> dict[str, Any]:
    """All that the last piece of an answer tells beside its text and usage; ``notes`` are about its text."""
    metadata: dict[str, Any] = {"model_name": model_name, "model_provider": "hypic"}
    if last.finish_reason is not None:
        metadata["finish_reason"] = last.finish_reason
    hypic = hypic_report(last.report, request, notes)
    return {**metadata, "hypic": hypic} if hypic else metadata


def logprobs_info(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities of the chosen tokens; lists of successive pieces are joined by LangChain."""
    return {"logprobs": {"content": [asdict(entry) for entry in logprobs]}} if logprobs else {}
