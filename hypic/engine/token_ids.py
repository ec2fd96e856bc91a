"""Token ids of a known text, with the bytes that its key is made of: packed once, not once a request.

A plain tuple of ids is good wherever these are; it only costs a pass over its numbers each time. Nothing is remembered
here: the bytes live as long as the ids that they are of.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property

ID_BYTES = 8


class TokenIds(tuple[int, ...]):
    """Token ids in order; ``packed`` are the same as bytes, eight an id, little-endian."""

    @classmethod
    def unpacked(cls, packed: bytes) -> TokenIds:
        """The ids of bytes that were ``packed``; these are shared."""
        made = cls(struct.unpack(f"<{len(packed) // ID_BYTES}q", packed))
        made.__dict__["packed"] = packed
        return made

    @cached_property
    def packed(self) -> bytes:
        """Made when it is first asked for."""
        return _packed(self)

    def head(self, stop: int) -> TokenIds:
        """The first ``stop`` of them."""
        return self if stop >= len(self) else TokenIds.unpacked(self.packed[: stop * ID_BYTES])


def packed_ids(ids: Sequence[int]) -> bytes:
    """Ids as bytes, eight each, little-endian."""
    return ids.packed if isinstance(ids, TokenIds) else _packed(ids)


def head_of(ids: tuple[int, ...], stop: int) -> tuple[int, ...]:
    """The first ``stop`` ids of a text; all of them are the text's own."""
    return ids.head(stop) if isinstance(ids, TokenIds) else ids[:stop]


def are_same(ids: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether these are the same ids, one for one."""
    if isinstance(ids, TokenIds) and isinstance(others, TokenIds):
        return ids is others or ids.packed == others.packed
    return ids is others or ids == others


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)
