"""What every tier below the device is: a Protocol for host, disk and remote tiers, and what they report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hypic.engine.segment import Label
from hypic.engine.store.header import About


@dataclass(frozen=True)
class Stored:
    """One entry of a tier, without its tensors; ``num_bytes`` as they count against the budget.

    ``num_kept_heads`` are the heads whose transitions are stored, of how many; ``hits`` are told by ``entries`` alone.
    """

    key: bytes
    num_bytes: int
    num_tokens: int
    labels: frozenset[Label] = frozenset()
    expires_s: float | None = None
    is_snapshot: bool = False
    num_kept_heads: tuple[int, int] = (0, 0)
    hits: int = 0

    @classmethod
    def of(cls, about: About, num_bytes: int) -> Stored:
        return cls(
            about.key,
            num_bytes,
            about.num_tokens,
            about.labels,
            about.expires_s,
            about.is_snapshot,
            about.num_kept_heads,
        )

    @property
    def num_saved(self) -> int:
        """Tokens that a hit does not compute."""
        return max(1, self.num_tokens)


@dataclass(frozen=True)
class TierStats:
    """Counters since the start, and what is held now. ``foreign`` entries belong to other models."""

    num_entries: int
    held_bytes: int
    budget_bytes: int
    hits: int = 0
    stored: int = 0
    evictions: int = 0
    corrupt: int = 0
    dropped: int = 0
    num_foreign: int = 0
    foreign_bytes: int = 0


class Tier(Protocol):
    """Encoded entries (``encoding.encode``) by key. All methods may be called from any thread and raise nothing.

    ``blocks``: its reads and writes take their time and are left to threads, and what it holds outlives the process.
    """

    name: str
    budget_bytes: int
    blocks: bool

    def __contains__(self, key: bytes) -> bool: ...

    def find(self, key: bytes) -> Stored | None: ...

    def get(self, key: bytes) -> Tensor | None:
        """The encoded entry, whole and checked against its checksum; a damaged one is removed and ``None``."""
        ...

    def put(self, key: bytes, buffer: Tensor) -> bool:
        """Keep an entry, at the cost of those of least value; whether it is kept. ``buffer`` is not changed again."""
        ...

    def remove(self, key: bytes) -> bool: ...

    def entries(self) -> list[Stored]: ...

    @property
    def stats(self) -> TierStats: ...

    def close(self) -> None: ...
