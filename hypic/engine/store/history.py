"""What was cached before: enough to say why a segment was not a hit. Bounded; holds no pages, slots or tensors."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hypic.engine.segment import Label, label_of
from hypic.types import Segment


class PlannedText(Protocol):
    """What is remembered of a planned segment: its label, its tokens, and the keys of its entries in order."""

    @property
    def segment(self) -> Segment: ...

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def keys(self) -> tuple[bytes, ...]: ...


@dataclass(frozen=True)
class Seen:
    """One way in which a text was encoded, behind which primer, and for whom first."""

    key: bytes
    seam: int
    label: Label
    primer: str = ""

    @property
    def namespace(self) -> str | None:
        return self.label.namespace


# Versions of a growing text all begin with its first entries: of those only the youngest are kept.
MOST_WHOLES = 64


class History:
    """Remembers up to ``capacity`` texts and as many names, youngest kept. ``rungs`` are digests of primers between
    which the place in a prompt decides."""

    def __init__(self, capacity: int = 20_000, rungs: frozenset[str] = frozenset()) -> None:
        self.capacity, self.rungs = capacity, rungs
        self._texts: OrderedDict[bytes, tuple[Seen, ...]] = OrderedDict()
        # Names are a namespace's own: what another one calls so is nobody else's business.
        self._names: OrderedDict[Label, str] = OrderedDict()
        self._entries: OrderedDict[tuple[Label, str], bytes] = OrderedDict()
        self._expired: OrderedDict[bytes, None] = OrderedDict()
        # By an entry's key and a label: the texts that begin with the entry's tokens, by the key of their last entry.
        self._parts: OrderedDict[bytes, dict[Label, dict[bytes, tuple[int, ...]]]] = OrderedDict()

    def met(self, segment: Segment, ids: tuple[int, ...], key: bytes, seam: int, primer: str = "") -> str:
        """Why ``key`` has no entry; from now on it counts as encoded."""
        reason = self.reason(segment, ids, key, seam, primer)
        self.note(segment, ids, key, seam, primer)
        return reason

    def note(self, segment: Segment, ids: tuple[int, ...], key: bytes, seam: int, primer: str = "") -> None:
        """A segment was encoded, behind the primer of that digest."""
        content = _content(ids)
        self._expired.pop(key, None)
        before = tuple(seen for seen in self._texts.pop(content, ()) if seen.key != key)
        self._texts[content] = (*before, Seen(key, seam, label_of(segment), primer))
        if segment.name is not None:
            self._names.pop(label_of(segment), None)
            self._names[label_of(segment)] = segment.text
        for table in (self._texts, self._names):
            while len(table) > self.capacity:
                table.popitem(last=False)

    def stored(self, label: Label, key: bytes, primer: str = "") -> None:
        """A segment's entry, encoded behind the primer of that digest, is in the store."""
        if label.name is not None:
            self._entries.pop((label, primer), None)
            self._entries[label, primer] = key
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def asked(self, key: bytes, num_tokens: int, planned: PlannedText) -> None:
        """An entry of ``num_tokens`` was asked for as one of a text, of which it may hold but the beginning."""
        if num_tokens == len(planned.ids) and key not in self._parts:
            return
        wholes = self._parts.pop(key, {})
        self._parts[key] = wholes
        texts = wholes.setdefault(label_of(planned.segment), {})
        texts.pop(planned.keys[-1], None)
        texts[planned.keys[-1]] = planned.ids
        if len(texts) > MOST_WHOLES:
            del texts[next(iter(texts))]
        while len(self._parts) > self.capacity:
            self._parts.popitem(last=False)

    def wholes(self, key: bytes, label: Label) -> Sequence[tuple[int, ...]]:
        """The texts under a label of which an entry holds the beginning, as far as that is known."""
        return list(self._parts.get(key, {}).get(label, {}).values())

    def expired(self, key: bytes) -> None:
        """A key's entry has lived its time."""
        self._expired.pop(key, None)
        self._expired[key] = None
        while len(self._expired) > self.capacity:
            self._expired.popitem(last=False)

    def previous(self, segment: Segment, primer: str = "") -> bytes | None:
        """The key that was stored last under a segment's name, of what was encoded behind that primer."""
        return None if segment.name is None else self._entries.get((label_of(segment), primer))

    def forget(self, fits: Callable[[set[Label]], bool]) -> None:
        """Drop what is known under labels that fit."""
        for content, before in list(self._texts.items()):
            kept = tuple(seen for seen in before if not fits({seen.label}))
            if not kept:
                del self._texts[content]
            elif kept != before:
                self._texts[content] = kept
        for key, wholes in list(self._parts.items()):
            for label in [label for label in wholes if fits({label})]:
                del wholes[label]
            if not wholes:
                del self._parts[key]
        for label in [label for label in self._names if fits({label})]:
            del self._names[label]
        for named in [named for named in self._entries if fits({named[0]})]:
            del self._entries[named]

    def reason(self, segment: Segment, ids: tuple[int, ...], key: bytes, seam: int, primer: str = "") -> str:
        """Why ``key`` has no entry."""
        before = self._texts.get(_content(ids), ())
        if any(seen.key == key for seen in before):
            return "expired" if key in self._expired else "evicted"
        if not before:
            return self._other_text(segment) or "first time"
        differing = {(seen.seam != seam, seen.namespace != segment.namespace) for seen in before}
        if (False, False) in differing:
            alike = [seen for seen in before if seen.seam == seam and seen.namespace == segment.namespace]
            return self._other(primer, {seen.primer for seen in alike})
        return "other namespace" if (False, True) in differing else "other seam"

    def _other(self, primer: str, before: set[str]) -> str:
        """Why an entry is another one, of a text that was encoded behind those primers."""
        if primer in before:
            return "other policy"
        return "other place" if primer in self.rungs and before & self.rungs else "other primer"

    def _other_text(self, segment: Segment) -> str:
        known = None if segment.name is None else self._names.get(label_of(segment))
        if known is None or known == segment.text:
            return ""
        shorter = min(len(known), len(segment.text))
        first = next((i for i in range(shorter) if known[i] != segment.text[i]), shorter)
        excerpt = segment.text[max(0, first - 8) : first + 24]
        return f"same name but other text from character {first} ({excerpt!r})"


def _content(ids: tuple[int, ...]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).digest()
