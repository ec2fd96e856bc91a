"""What segments and links cost in tests of planning, and jobs and members that have these costs."""

from __future__ import annotations

from dataclasses import replace

from hypic.engine.parallel.assign import Job, Member
from hypic.engine.parallel.cold import cold
from hypic.engine.parallel.cost import EncodeCost, EntrySize, LinkCost

ENCODE = EncodeCost(step_s=0.016, token_s=2e-5, pair_s=2e-10)
LINK = LinkCost(2e-4, 5e-12)
SIZE = EntrySize(123 * 2**20, 20 * 2**10)
# Seconds that steps of these segments took on an H200, whose host took 70 to 85 ms to launch any of them.
LAUNCHED = (
    ([64], 0.0853), ([256], 0.0857), ([1024], 0.0699), ([1024] * 4, 0.0739), ([1024] * 8, 0.1219),
    ([4096] * 2, 0.1246), ([1024] * 16, 0.2353),
)  # fmt: skip


def members(count: int, **changes: float) -> list[Member]:
    return [Member(rank, ENCODE, LINK, **changes) for rank in range(count)]  # type: ignore[arg-type]


def jobs(*tokens: int, holders: frozenset[int] = frozenset()) -> list[Job]:
    return [Job(number, count, SIZE.of(count), holders) for number, count in enumerate(tokens)]


def cold_s(
    wanted: list[Job], believed: list[Member], truth: list[EncodeCost], planner: str, steals: bool = True
) -> float:
    """Where only what encoding costs is believed wrongly."""
    true = [replace(member, encode=cost) for member, cost in zip(believed, truth, strict=True)]
    return cold(wanted, believed, true, planner, steals).seconds
