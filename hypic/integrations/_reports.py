"""What is known about an answered request, as plain values that any framework can carry. Knows no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hypic.integrations._common import Request
from hypic.registry import POLICY_NAME
from hypic.types import CacheReport, Usage


def token_counts(usage: Usage) -> dict[str, int]:
    """Token counts under the names of OpenAI's API; ``cached_tokens`` of the prompt were not computed again."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def hypic_report(report: CacheReport | None, request: Request, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The cache report of a request with notes on its answer, and where flat text was cut for it."""
    noted = [*request.notes, *notes]
    told = _told(report, noted) if report is not None else {"notes": noted} if noted else {}
    return {**told, **_found(request)}


def _told(report: CacheReport, notes: Sequence[str]) -> dict[str, Any]:
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
