"""What a memory budget holds, from sizes alone: the context it allows, and its split into pages and slots.

Plain arithmetic, so that it can be asked before there is a pool or a model (``checkpoints/fitting.py``). Not here: the
memory itself (``pool.py``), and how much of it a device has free (``runner.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hypic.config import EngineConfig
from hypic.errors import ConfigError

TYPICAL_SEGMENT_TOKENS = 512
MIB = 2**20
# The context that is chosen from a budget is a whole number of tokens in whole pages: by so many pages can what a
# budget needs run ahead of it.
ROUNDING_PAGES = 2
# Requests that decode together beyond which the host is no longer what a step waits for; one part in so many of what is
# left of a budget.
MOST_AHEAD = 16
AHEAD_SHARE = 16


class Kept(Protocol):
    """Bytes of a token in all full-attention layers, and of a state and a transition in all linear ones."""

    @property
    def token_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def transition_bytes(self) -> int: ...


@dataclass(frozen=True)
class Need:
    """What an allocation asks for."""

    pages: int = 0
    states: int = 0
    transitions: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(self.pages + other.pages, self.states + other.states, self.transitions + other.transitions)


def reserve(page_size: int, max_context: int, num_running: int) -> Need:
    """What a pool keeps besides its entries: pages of one request of ``max_context`` tokens, running states, and what
    one encode takes."""
    return Need(-(-max_context // page_size) + 1, num_running + 2, 1)


def needed_bytes(kept: Kept, page_size: int, max_context: int, num_running: int) -> int:
    """The least budget of a pool: its reserve, and what it never hands out."""
    fewest = reserve(page_size, max_context, num_running)
    # Padded tokens write to one page and one state slot more, and one slot is all zeros.
    pages, states = fewest.pages + 1, fewest.states + 2
    return pages * page_size * kept.token_bytes + states * kept.state_bytes + kept.transition_bytes


def num_ahead(kept: Kept, budget_bytes: int, page_size: int, max_context: int, num_running: int) -> int:
    """State slots for steps that are launched ahead: one for each of a few requests, out of a small share of what a
    budget holds beside its reserve."""
    spare = budget_bytes - needed_bytes(kept, page_size, max_context, num_running)
    most = min(MOST_AHEAD, num_running)
    return max(0, min(most, spare // (AHEAD_SHARE * kept.state_bytes))) if kept.state_bytes else most


def split(
    kept: Kept,
    budget_bytes: int,
    page_size: int,
    max_context: int,
    num_running: int,
    segment_tokens: int = TYPICAL_SEGMENT_TOKENS,
) -> Need:
    """How many pages, states and transitions a budget holds: the reserve, and as much for entries of ``segment_tokens``
    as it allows.

    Raises:
        ConfigError: the budget does not hold the reserve.
    """
    page_bytes, entry_slots = page_size * kept.token_bytes, kept.state_bytes + kept.transition_bytes
    entry_bytes = entry_slots + segment_tokens * kept.token_bytes
    needed = needed_bytes(kept, page_size, max_context, num_running)
    if budget_bytes < needed:
        raise ConfigError(
            f"memory is {budget_bytes} bytes, too small for {num_running} running states and one request of "
            f"{max_context} tokens, which take {needed} bytes; raise memory= or lower max_context= or max_running=."
        )
    spare, fewest = budget_bytes - needed, reserve(page_size, max_context, num_running)
    share = entry_slots / entry_bytes if entry_bytes else 0.0
    entries = int(spare * share / entry_slots) if entry_slots else max(64, spare // (segment_tokens * page_bytes))
    # Without full attention pages are mere numbers, and must not keep requests apart.
    pages = int(spare * (1 - share) / page_bytes) if page_bytes else (num_running + entries) * fewest.pages
    return fewest + Need(pages, entries, entries)


def context_within(config: EngineConfig, longest: int, budget_bytes: int, token_bytes: int) -> int:
    """The configured context; by default the model's, ``longest``, or what half of the memory can hold of it."""
    if config.max_context:
        return min(config.max_context, longest)
    return longest if not token_bytes else max(256, min(longest, budget_bytes // (2 * token_bytes)))


def split_of(kept: Kept, longest: int, budget_bytes: int, config: EngineConfig) -> tuple[int, Need]:
    """The context and the split of a budget, as the settings want them.

    Raises:
        ConfigError: the budget does not hold one request; the message names one that does.
    """
    context = context_within(config, longest, budget_bytes, kept.token_bytes)
    if budget_bytes < needed_bytes(kept, config.page_size, context, config.max_running):
        enough = enough_bytes(kept, longest, budget_bytes, config) // MIB
        raise ConfigError(
            f"memory is {config.memory!r}, {budget_bytes} bytes, too small for {config.max_running} running states "
            f"and one request of {context} tokens; pass memory='{enough}MiB' or more, or lower max_context= or "
            "max_running=."
        )
    left_bytes = budget_bytes - ahead_of(kept, budget_bytes, context, config) * kept.state_bytes
    return context, split(
        kept, left_bytes, config.page_size, context, config.max_running, config.typical_segment_tokens
    )


def ahead_of(kept: Kept, budget_bytes: int, context: int, config: EngineConfig) -> int:
    """State slots for steps that are launched ahead, none unless the device is named a GPU: elsewhere a step is over
    when it is launched, and one that is launched ahead would keep a token waiting."""
    if not config.device.startswith("cuda"):
        return 0
    return num_ahead(kept, budget_bytes, config.page_size, context, config.max_running)


def enough_bytes(kept: Kept, longest: int, budget_bytes: int, config: EngineConfig) -> int:
    """Whole MiB from which on every budget holds one request of the context that it is given; close to the least.

    A larger budget may be given a longer context, by half of what is added at most: taking what is needed for the next
    budget comes to an end.
    """
    slack = ROUNDING_PAGES * config.page_size * kept.token_bytes

    def needed(budget: int) -> int:
        context = context_within(config, longest, budget, kept.token_bytes)
        return -(-(needed_bytes(kept, config.page_size, context, config.max_running) + slack) // MIB) * MIB

    enough = -(-budget_bytes // MIB) * MIB
    while (more := needed(enough)) > enough:
        enough = more
    return enough
