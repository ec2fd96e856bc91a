"""How many cached segments a budget holds, from sizes alone: the pool's own split, before there is a pool.

A segment takes whole pages of its interior, one state slot and one transition slot. Snapshots of conversations take
from the same pages and states, and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypic.config import EngineConfig
from hypic.engine.sizing import Kept, Need, context_within, reserve, split_of
from hypic.errors import ConfigError
from hypic.types import Policy

MIB = 2**20


@dataclass(frozen=True)
class Fit:
    """How many segments of a list, from its first one on, a budget keeps; both numbers are exact for the device that is
    named (``auto``: a CPU; a GPU keeps a few states for steps that are launched ahead).

    ``at_work`` segments stay beside ``max_running`` requests, one of them as long as the context, and another encode.
    ``at_rest`` segments can be warmed one after the other until the first of them is evicted. ``context`` is the
    longest request; ``refusal`` says why an engine would not start with this budget. A primer, each rung of
    which takes a state and the pages of its tokens, is not counted, nor that a segment may be kept once for each
    of them (``Policy.rungs``), nor the few tokens by which a seam that follows an opening is wider.
    """

    memory_bytes: int
    at_work: int = 0
    at_rest: int = 0
    context: int = 0
    refusal: str | None = None


def pages_of(num_tokens: int, policy: Policy, page_size: int) -> list[int]:
    """Pages of each interior of a segment that is cached."""
    interiors = policy.with_(min_segment_tokens=0).interiors(num_tokens)
    return [-(-(stop - start) // page_size) for start, stop in interiors]


def fit(kept: Kept, longest: int, counts: Sequence[int], config: EngineConfig) -> Fit:
    """For segments of ``counts`` tokens; ``longest`` is the model's context, ``config.memory`` a number of bytes."""
    pages = [pages_of(count, config.policy, config.page_size) for count in counts]
    return _fit(kept, longest, config, counts, lambda need: _first(pages, need))


def fit_alike(kept: Kept, longest: int, num_tokens: int, config: EngineConfig) -> Fit:
    """For as many segments of ``num_tokens`` tokens each as there may be."""
    pages = pages_of(num_tokens, config.policy, config.page_size)

    def held(need: Need) -> int:
        return min(need.transitions // len(pages), need.pages // sum(pages)) if pages else 2**63

    return _fit(kept, longest, config, [num_tokens], held)


def _fit(kept: Kept, longest: int, config: EngineConfig, counts: Sequence[int], held: Callable[[Need], int]) -> Fit:
    budget, size = config.memory_bytes(0), config.page_size
    try:
        context, whole = split_of(kept, longest, budget, config)
    except ConfigError as error:
        return Fit(budget, context=context_within(config, longest, budget, kept.token_bytes), refusal=str(error))
    kept_back = reserve(size, context, config.max_running)
    spare = Need(whole.pages - kept_back.pages, transitions=whole.transitions - kept_back.transitions)
    warming = max((_warming_pages(count, config.policy, size) for count in counts), default=0)
    return Fit(budget, held(spare), held(replace(whole, pages=whole.pages - warming)), context)


def _warming_pages(num_tokens: int, policy: Policy, page_size: int) -> int:
    """Pages that lie beside a segment's last entry while it is warmed: the request's rows, and what stands before the
    entry's interior."""
    policy = policy.with_(min_segment_tokens=0)
    interiors = policy.interiors(num_tokens)
    start = interiors[-1][0] if interiors else 0
    return -(-(num_tokens - policy.num_cached(num_tokens) + 2) // page_size) + -(-start // page_size)


def memory_for(kept: Kept, longest: int, counts: Sequence[int], config: EngineConfig) -> int:
    """The least memory, in whole MiB, that keeps all of them at work; ``config.memory`` does not count."""

    def holds(num_mib: int) -> bool:
        return fit(kept, longest, counts, replace(config, memory=num_mib * MIB)).at_work == len(counts)

    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high * MIB


def _first(pages: Sequence[Sequence[int]], need: Need) -> int:
    """How many segments, from the first on, are held."""
    number, used, num_entries = 0, 0, 0
    for own in pages:
        used, num_entries = used + sum(own), num_entries + len(own)
        if used > need.pages or num_entries > need.transitions:
            break
        number += 1
    return number
