"""Why an answer from segments differs from full recompute, which segment does it, and what to set.

One prompt is answered greedily in several ways: in full; in full again in other company, which shows what rounding
alone does; from segments; and, where that gives another answer, with each cached segment run live in turn and with
wider seams. All ways have the very same token ids. Not here: scores over many prompts (``hypic eval``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypic.engine.plan import Piece, placed
from hypic.errors import ConfigError
from hypic.types import Completion, Policy, SamplingParams, TokenLogprob

NUM_LOGPROBS = 100
WIDER = (2, 4, 8)
Question = tuple[Sequence[Piece], Policy]
Ask = Callable[[Sequence[Question], SamplingParams], list[Completion]]


@dataclass(frozen=True)
class Difference:
    """Where two answers part: ``position`` counts the answer's tokens from 0. ``margin`` is by how much, in nats,
    full recompute preferred its own token there, and ``other_margin`` by how much the other way preferred the other
    one; small margins are near ties. Where a token is not among the 100 likeliest, the margin is a lower bound."""

    position: int
    token_id: int
    other_token_id: int
    margin: float
    other_margin: float


@dataclass(frozen=True)
class Way:
    """One way of answering, against full recompute.

    ``kl`` is the mean divergence of the next token, in nats, over the tokens up to the first difference, taken over
    the 100 likeliest tokens and all others as one: a lower bound. ``extra_tokens`` are prompt tokens that this way
    runs on each request beyond what the compared policy runs. ``segment`` is the one that was run live, counted from 0
    among all segments of the prompt.
    """

    name: str
    text: str
    difference: Difference | None
    kl: float
    extra_tokens: int = 0
    segment: int | None = None
    setting: str = ""

    @property
    def is_same(self) -> bool:
        """Whether the tokens are those of full recompute."""
        return self.difference is None


@dataclass(frozen=True)
class Comparison:
    """What ``LLM.compare`` found; ``advice`` says in a sentence or two what to set."""

    full: Completion
    again: Way
    segments: Way
    live: tuple[Way, ...] = ()
    seams: tuple[Way, ...] = ()
    advice: str = ""

    @property
    def closest(self) -> Way | None:
        """The segment whose running live comes closest to full recompute, or ``None`` if none was tried."""
        return min(self.live, key=lambda way: (not way.is_same, way.kl), default=None)


def check_policy(policy: Policy) -> None:
    """
    Raises:
        ConfigError: the policy reuses no segments, so that there is nothing to compare.
    """
    if policy.reuse != "segments":
        raise ConfigError(f"reuse is {policy.reuse!r}, which is full recompute; compare a policy that reuses segments.")


def compare(pieces: Sequence[Piece], policy: Policy, max_tokens: int, ask: Ask) -> Comparison:
    """Answers in every way; ``ask`` answers many prompts in each other's company.

    Raises:
        ConfigError: the policy reuses no segments.
    """
    check_policy(policy)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=NUM_LOGPROBS)
    none = replace(policy, reuse="none")
    full = ask([(pieces, none)], sampling)[0]
    again = _way("full recompute in other company", full, ask([(pieces, none)] * 3, sampling)[-1])
    cached = ask([(pieces, policy)], sampling)[0]
    found = Comparison(full, again, _way("segments", full, cached))
    if not found.segments.is_same:
        found = replace(
            found,
            live=_live(pieces, policy, sampling, ask, found, cached),
            seams=_seams(pieces, policy, sampling, ask, found, cached),
        )
    return replace(found, advice=advice(found))


def _live(
    pieces: Sequence[Piece], policy: Policy, sampling: SamplingParams, ask: Ask, found: Comparison, cached: Completion
) -> tuple[Way, ...]:
    """Each cached segment run live, the others as they were, at the places that they had."""
    assert cached.report is not None, "a whole answer comes with its report"
    places = [place for place, piece in enumerate(pieces) if piece.segment is not None]
    tried = [n for n, segment in enumerate(cached.report.segments) if segment.outcome != "live"]
    kept = placed(pieces)
    prompts = [[replace(p, segment=None) if at == places[n] else p for at, p in enumerate(kept)] for n in tried]
    out = []
    for number, answer in zip(tried, ask([(one, policy) for one in prompts], sampling), strict=True):
        row = cached.report.segments[number]
        name, extra = row.name or f"segment {number}", row.num_cached(policy)
        way = _way(f"{name} live", found.full, answer)
        out.append(replace(way, extra_tokens=extra, segment=number, setting="cache=False"))
    return tuple(out)


def _seams(
    pieces: Sequence[Piece], policy: Policy, sampling: SamplingParams, ask: Ask, found: Comparison, cached: Completion
) -> tuple[Way, ...]:
    """Wider seams; which segments are cached stays as it was but for those that the seam covers."""
    most = policy.seam_every or math.inf
    widths = [width for factor in WIDER if (width := max(1, policy.seam) * factor) < most]
    policies = [replace(policy, seam=width, min_segment_tokens=policy.shortest) for width in widths]
    out = []
    answers = ask([(pieces, one) for one in policies], sampling)
    for width, answer in zip(widths, answers, strict=True):
        extra = num_cached(cached) - num_cached(answer)
        way = _way(f"seam {width}", found.full, answer)
        out.append(replace(way, extra_tokens=extra, setting=f"seam={width}, min_segment_tokens={policy.shortest}"))
    return tuple(out)


def num_cached(answer: Completion) -> int:
    """Tokens of an answer's prompt that are not run when its segments are cached."""
    assert answer.report is not None, "a whole answer comes with its report"
    return sum(row.num_cached(answer.report.policy) for row in answer.report.segments)


def _way(name: str, full: Completion, other: Completion) -> Way:
    difference = _difference(full, other)
    shared = len(full.token_ids) if difference is None else difference.position + 1
    pairs = list(zip(full.logprobs, other.logprobs, strict=False))[:shared]
    kl = sum(divergence(mine, theirs) for mine, theirs in pairs) / len(pairs)
    return Way(name, other.text, difference, kl)


def _difference(full: Completion, other: Completion) -> Difference | None:
    for position, (mine, theirs) in enumerate(zip(full.logprobs, other.logprobs, strict=False)):
        if mine.token_id != theirs.token_id:
            return Difference(
                position,
                mine.token_id,
                theirs.token_id,
                _margin(mine, theirs.token_id),
                _margin(theirs, mine.token_id),
            )
    return None


def _margin(at: TokenLogprob, other_id: int) -> float:
    """By how much the chosen token was preferred to another."""
    return at.logprob - dict(at.top).get(other_id, min((value for _, value in at.top), default=at.logprob))


def divergence(full: TokenLogprob, other: TokenLogprob) -> float:
    """``KL(full || other)`` over the ids that both name, and all others as one: never more than over all ids."""
    mine, theirs = dict(full.top), dict(other.top)
    shared = mine.keys() & theirs.keys()
    inside = sum(math.exp(mine[i]) * (mine[i] - theirs[i]) for i in shared)
    rest = max(0.0, 1.0 - sum(math.exp(mine[i]) for i in shared))
    other_rest = max(1e-12, 1.0 - sum(math.exp(theirs[i]) for i in shared))
    return max(0.0, inside + (rest * math.log(rest / other_rest) if rest > 1e-12 else 0.0))


def advice(found: Comparison) -> str:
    """What to set, and what it costs."""
    difference = found.segments.difference
    if difference is None:
        return "Segments give the answer of full recompute; there is nothing to set."
    noise = found.again.difference
    if noise is not None and noise.position <= difference.position:
        return (
            f"Full recompute in other company differs too, at token {noise.position}: two tokens are "
            f"{noise.margin:.2g} nats apart, which rounding can turn; set deterministic=True for answers that do not "
            "depend on the batch."
        )
    closing = [way for way in (*found.live, *found.seams) if way.is_same]
    if closing:
        best = min(closing, key=lambda way: way.extra_tokens)
        what = (
            f"Segment(..., {best.setting}) for {best.name.removesuffix(' live')}"
            if best.segment is not None
            else best.setting
        )
        return (
            f"Set {what}: that gives the answer of full recompute and runs {best.extra_tokens} more tokens a request."
        )
    near = f"; {found.closest.name} comes closest" if found.closest is not None else ""
    return (
        f"No single segment and no seam up to {WIDER[-1]} times as wide gives the answer of full recompute{near}. "
        "Where this prompt must be exact, set reuse='prefix' or reuse='none' for it."
    )
