"""What the cache saved for one request: counts from where tokens entered the model, reasons from admission."""

from __future__ import annotations

from collections.abc import Mapping

from hypic.engine.plan import PlannedSegment
from hypic.engine.pool import Pool
from hypic.engine.request import Request
from hypic.types import CacheReport, SegmentReport
from hypic.version import __version__


def cache_report(
    request: Request, pool: Pool, fingerprint: str, times_s: Mapping[str, float], notes: tuple[str, ...]
) -> CacheReport:
    """The report of a request that is still held."""
    prompt = request.prompt
    computed = request.computed + request.encoded
    if request.max_tokens == 0:
        return _warm_report(request, pool, fingerprint, times_s, notes)
    return CacheReport(
        segments=tuple(_segment(request, planned, pool) for planned in prompt.segments),
        prompt_tokens=len(prompt.ids),
        computed_tokens=computed,
        reused_tokens=max(0, len(prompt.ids) - request.computed - _newly_encoded(request)),
        times_s=dict(times_s),
        policy=prompt.policy,
        fingerprint=fingerprint,
        version=__version__,
        notes=notes,
    )


def _warm_report(
    request: Request, pool: Pool, fingerprint: str, times_s: Mapping[str, float], notes: tuple[str, ...]
) -> CacheReport:
    """Of a request that only wanted its segments encoded: nothing else of its prompt was run or reused."""
    planned = {segment.key: segment for segment in request.prompt.segments}
    hits = [p for key, p in planned.items() if key is not None and request.outcomes.get(key, ("hit", ""))[0] == "hit"]
    return CacheReport(
        segments=tuple(_segment(request, segment, pool) for segment in request.prompt.segments),
        prompt_tokens=sum(len(segment.ids) for segment in request.prompt.segments),
        computed_tokens=request.encoded,
        reused_tokens=sum(len(segment.ids) for segment in hits),
        times_s=dict(times_s),
        policy=request.prompt.policy,
        fingerprint=fingerprint,
        version=__version__,
        notes=notes,
    )


def _newly_encoded(request: Request) -> int:
    """Interior tokens of the prompt that were encoded for this request; a segment that stands twice counts once.

    What an entry took over from an older one was not.
    """
    keys = {p.key: len(p.ids) - request.prompt.policy.seam for p in request.prompt.segments if p.key is not None}
    encoded = {key: n for key, n in keys.items() if request.outcomes.get(key, ("hit", ""))[0] == "encoded"}
    return sum(n - request.continued.get(key, 0) for key, n in encoded.items())


def _segment(request: Request, planned: PlannedSegment, pool: Pool) -> SegmentReport:
    segment, num_tokens = planned.segment, len(planned.ids)
    if planned.key is None:
        return SegmentReport(segment.kind, segment.name, segment.source, "live", num_tokens, reason=planned.reason)
    outcome, reason = request.outcomes.get(planned.key, ("hit", ""))
    pages = pool.pages_for(num_tokens - request.prompt.policy.seam)
    num_bytes = pages * pool.page_bytes + pool.layout.state_bytes + pool.layout.transition_bytes
    tier = request.tiers.get(planned.key, "device")
    return SegmentReport(segment.kind, segment.name, segment.source, outcome, num_tokens, num_bytes, tier, reason)
