"""Token ids: those of a known text, packed once for the key that is made of them; and those of a prompt, run by run.

A plain tuple of ids is good wherever these are; it only costs a pass over its numbers each time. Nothing is remembered
here: bytes and key live as long as the ids that they are of, or as whoever remembers the text.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

ID_BYTES = 8


@dataclass(eq=False)
class Packed:
    """Ids as bytes, eight an id, little-endian; and the last key that was made of them, behind what it was begun with
    (which is the same object whenever it is the same). ``ends`` are those of lines and sentences among a text's first
    tokens (``opening.ends_of``)."""

    data: bytes
    key: tuple[Any, bytes] | None = None
    ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        """How many ids."""
        return len(self.data) // ID_BYTES


class TokenIds(tuple[int, ...]):
    """Token ids in order, and the same ``packed``."""

    @classmethod
    def unpacked(cls, packed: Packed) -> TokenIds:
        """The ids of what is packed already; it is shared."""
        made = cls(struct.unpack(f"<{len(packed)}q", packed.data))
        made.__dict__["packed"] = packed
        return made

    @classmethod
    def ending(cls, ids: Iterable[int], ends: tuple[int, ...]) -> TokenIds:
        """The ids of a text of which it is known where its first lines and sentences end."""
        made = cls(ids)
        made.packed.ends = ends
        return made

    @cached_property
    def packed(self) -> Packed:
        """Made when it is first asked for."""
        return Packed(packed_ids(self))

    def head(self, stop: int) -> TokenIds:
        """The first ``stop`` of them."""
        return self if stop >= len(self) else TokenIds.unpacked(Packed(self.packed.data[: stop * ID_BYTES]))


def packed_ids(ids: Sequence[int]) -> bytes:
    """Ids as bytes, eight each, little-endian."""
    return struct.pack(f"<{len(ids)}q", *ids)


def head_of(ids: tuple[int, ...], stop: int) -> tuple[int, ...]:
    """The first ``stop`` ids of a text; all of them are the text's own."""
    return ids.head(stop) if isinstance(ids, TokenIds) else ids[:stop]


def are_same(ids: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether these are the same ids, one for one."""
    if isinstance(ids, TokenIds) and isinstance(others, TokenIds):
        return ids.packed is others.packed or ids.packed.data == others.packed.data
    return ids is others or ids == others


class Ids(Sequence[int]):
    """Token ids of runs, one run after the other. A warm request needs a few of them before its first token, so they
    are made one tuple only when all are asked for."""

    def __init__(self, runs: Iterable[tuple[int, ...]]) -> None:
        self.runs = tuple(runs)
        self._stops = tuple(accumulate(map(len, self.runs)))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if not isinstance(at, slice):
            return self.whole[at]
        start, stop, step = at.indices(self._stops[-1] if self._stops else 0)
        if step != 1 or stop - start == len(self):
            return self.whole[at]
        return self.between(start, stop)

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __eq__(self, other: object) -> bool:
        return self.whole == (other.whole if isinstance(other, Ids) else other)

    def __hash__(self) -> int:
        return hash(self.whole)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """All of them."""
        ids: list[int] = []
        for run in self.runs:
            ids += run
        return tuple(ids)

    def between(self, start: int, stop: int) -> tuple[int, ...]:
        """Those of ``start..stop-1``. What lies in one run is cut from it, and a whole run is itself: equal to what it
        was before at a glance."""
        number = bisect_right(self._stops, start)
        if number < len(self.runs) and stop <= self._stops[number]:
            run = self.runs[number]
            before = self._stops[number] - len(run)
            if start == before and stop == self._stops[number]:
                return run
            return run[start - before : max(start, stop) - before]
        ids: list[int] = []
        for run, end in zip(self.runs[number:], self._stops[number:], strict=True):
            before = end - len(run)
            if before >= stop:
                break
            ids += run[max(0, start - before) : stop - before]
        return tuple(ids)
