"""What was cached before: enough to say why a segment was not a hit. Bounded; holds no pages, slots or tensors."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from hypic.types import Segment


@dataclass(frozen=True)
class Seen:
    """One way in which a text was encoded."""

    key: bytes
    seam: int
    namespace: str | None


class History:
    """Remembers up to ``capacity`` texts and as many names, youngest kept."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        self._texts: OrderedDict[bytes, tuple[Seen, ...]] = OrderedDict()
        self._names: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._entries: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()

    def note(self, segment: Segment, ids: tuple[int, ...], key: bytes, seam: int) -> None:
        """A segment was encoded."""
        content = _content(ids)
        before = tuple(seen for seen in self._texts.pop(content, ()) if seen.key != key)
        self._texts[content] = (*before, Seen(key, seam, segment.namespace))
        if segment.name is not None:
            self._names.pop((segment.source, segment.name), None)
            self._names[segment.source, segment.name] = segment.text
        for table in (self._texts, self._names):
            while len(table) > self.capacity:
                table.popitem(last=False)

    def stored(self, name: str | None, source: str | None, key: bytes) -> None:
        """A segment's entry is in the store."""
        if name is not None:
            self._entries.pop((source, name), None)
            self._entries[source, name] = key
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def previous(self, segment: Segment) -> bytes | None:
        """The key that was stored last under a segment's name."""
        return None if segment.name is None else self._entries.get((segment.source, segment.name))

    def reason(self, segment: Segment, ids: tuple[int, ...], key: bytes, seam: int) -> str:
        """Why ``key`` has no entry."""
        before = self._texts.get(_content(ids), ())
        if any(seen.key == key for seen in before):
            return "evicted"
        if not before:
            return self._other_text(segment) or "first time"
        differing = {(seen.seam != seam, seen.namespace != segment.namespace) for seen in before}
        if (False, False) in differing:
            return "other policy"
        return "other namespace" if (False, True) in differing else "other seam"

    def _other_text(self, segment: Segment) -> str:
        known = None if segment.name is None else self._names.get((segment.source, segment.name))
        if known is None or known == segment.text:
            return ""
        shorter = min(len(known), len(segment.text))
        first = next((i for i in range(shorter) if known[i] != segment.text[i]), shorter)
        excerpt = segment.text[max(0, first - 8) : first + 24]
        return f"same name but other text from character {first} ({excerpt!r})"


def _content(ids: tuple[int, ...]) -> bytes:
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()
