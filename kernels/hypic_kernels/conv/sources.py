"""Where the input of a tap lies, as one int32, so that a plan can be overwritten on the device between replays.

``>= 0`` is a row of ``x``; ``-1 - (slot * (W - 1) + j)`` is row ``j`` of the tail in ``slot``; ``NOTHING`` is zeros.
"""

from __future__ import annotations

from typing import NamedTuple

NOTHING = -(2**31)
"""Zeros: before the first token of a chain without history, and all taps of padding."""


class ConvError(ValueError):
    """Tensors that do not fit each other, or that the kernel cannot address."""


FEW_CHANNELS = 64
FEW_TOKENS = 8
FEW_KEPT = 32


def is_few(num_tokens: int, num_kept: int) -> bool:
    """Whether all tokens, and all rows that are kept for new tails, are so few that one program takes them together."""
    return 0 < num_tokens <= FEW_TOKENS and 0 < num_kept <= FEW_KEPT


def tail_source(slot: int, row: int, width: int) -> int:
    """Row ``row`` (of ``width - 1``, oldest first) of the tail in ``slot``."""
    return -1 - (slot * (width - 1) + row)


class Config(NamedTuple):
    """``rows`` tokens by ``channels`` per program."""

    rows: int
    channels: int
    num_warps: int


CANDIDATES = (
    Config(4, 256, 4),
    Config(8, 256, 4),
    Config(16, 128, 4),
    Config(2, 512, 4),
    Config(1, 1024, 4),
    Config(32, 128, 8),
)
"""Layouts worth measuring, the default first; every one of them is tested."""
