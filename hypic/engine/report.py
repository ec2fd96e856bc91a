"""What the cache saved for one request: counts from where tokens entered the model, reasons from admission."""

from __future__ import annotations

from collections.abc import Mapping

from hypic.engine.plan import Interior, PlannedSegment
from hypic.engine.pool import Pool
from hypic.engine.request import Request
from hypic.types import CacheReport, Outcome, SegmentReport
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
    planned = {segment.keys: segment for segment in request.prompt.segments if segment.keys}
    hits = [segment for segment in planned.values() if _outcome(request, segment)[0] == "hit"]
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
    spans = {span.key: span.stop - span.start for span in _interiors(request)}
    encoded = {key: n for key, n in spans.items() if request.outcomes.get(key, ("hit", ""))[0] == "encoded"}
    return sum(n - request.continued.get(key, 0) for key, n in encoded.items())


def _interiors(request: Request) -> list[Interior]:
    return [span for span in request.prompt.spans if isinstance(span, Interior)]


def _outcome(request: Request, planned: PlannedSegment) -> tuple[Outcome, str]:
    """A segment is a hit if all its interiors are."""
    found = [request.outcomes.get(key, ("hit", "")) for key in planned.keys]
    return next((one for one in found if one[0] != "hit"), found[0])


def _segment(request: Request, planned: PlannedSegment, pool: Pool) -> SegmentReport:
    segment, num_tokens, seam = planned.segment, len(planned.ids), planned.seam
    if not planned.keys:
        return SegmentReport(segment.kind, segment.name, segment.source, "live", num_tokens, reason=planned.reason)
    outcome, reason = _outcome(request, planned)
    pages = [pool.pages_for(stop - start) for start, stop in request.prompt.policy.interiors(num_tokens, seam)]
    num_bytes = sum(pages) * pool.page_bytes + len(pages) * (pool.layout.state_bytes + pool.layout.transition_bytes)
    tier = next((request.tiers[key] for key in planned.keys if key in request.tiers), "device")
    return SegmentReport(segment.kind, segment.name, segment.source, outcome, num_tokens, num_bytes, tier, reason, seam)
