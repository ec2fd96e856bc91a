"""What a source of segments had when it was looked at last, and what changed since the time before."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hypic.types import Segment


@dataclass(frozen=True)
class SegmentEvent:
    """What happened to one segment of a source; ``old`` and ``new`` are digests of its text."""

    kind: Literal["added", "changed", "removed"]
    name: str | None
    source: str | None
    old: str | None = None
    new: str | None = None


@dataclass(frozen=True)
class Item:
    """A segment, and live text before it."""

    segment: Segment
    label: str = ""

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.segment.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def key(self) -> tuple[str | None, str | None]:
        unnamed = self.segment.name is None and self.segment.source is None
        return (self.digest, None) if unnamed else (self.segment.name, self.segment.source)

    def event(self, kind: Literal["added", "changed", "removed"], old: Item | None = None) -> SegmentEvent:
        before = self.digest if kind == "removed" else old.digest if old is not None else None
        after = None if kind == "removed" else self.digest
        return SegmentEvent(kind, self.segment.name, self.segment.source, before, after)


class Held:
    """What a source had when it was looked at last. Safe to use from several threads."""

    def __init__(self, load: Callable[[], list[Item]]) -> None:
        self._load = load
        self._items: list[Item] | None = None
        self._lock = threading.Lock()

    def poll(self) -> list[SegmentEvent]:
        with self._lock:
            old = {item.key: item for item in self._items or ()}
            self._items = self._load()
            new = {item.key: item for item in self._items}
        changed = [
            item.event("changed", old[key]) if key in old else item.event("added")
            for key, item in new.items()
            if key not in old or old[key].digest != item.digest
        ]
        return [*changed, *(item.event("removed") for key, item in old.items() if key not in new)]

    def segments(self) -> list[Segment]:
        if self._items is None:
            self.poll()
        segments: list[Segment] = []
        for item in self._items or ():
            if item.label:
                segments.append(replace(item.segment, text=item.label, cache=False))
            segments.append(item.segment)
        return segments
