"""Which texts are meant by labels, and where their tokens stand inside others. Pure; removes nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hypic.engine.segment import Label


@dataclass(frozen=True)
class Wanted:
    """Which texts are meant: all labels that are given must fit; none given means all texts."""

    source: str | None = None
    name: str | None = None
    namespace: str | None = None

    @property
    def is_all(self) -> bool:
        return self.source is None and self.name is None and self.namespace is None

    def fits(self, labels: Iterable[Label]) -> bool:
        """Whether one of the labels is meant."""
        return self.is_all or any(label.fits(self.name, self.source, self.namespace) for label in labels)

    def reaches(self, labels: Iterable[Label]) -> bool:
        """Whether something so labelled has to go where it holds a text that is meant."""
        return self.namespace is None or any(label.namespace == self.namespace for label in labels)


def _whole(key: bytes, label: Label) -> Iterable[Sequence[int]]:
    """Nothing is known of texts longer than their entry."""
    return ()


@dataclass
class Texts:
    """Token ids of texts that are meant, found again inside others. ``wholes`` gives the texts of which an entry, known
    by a label, holds the beginning; none where it holds all, or where that is not known any more."""

    wanted: Wanted
    needles: set[bytes] = field(default_factory=set)
    wholes: Callable[[bytes, Label], Iterable[Sequence[int]]] = _whole

    def take(self, key: bytes, labels: Iterable[Label], ids: Callable[[], Iterable[int]]) -> None:
        """Take in what an entry's tokens ``ids`` are of, if it is meant."""
        labels = tuple(labels)
        if not self.wanted.fits(labels):
            return
        for label in [label for label in labels if self.wanted.fits((label,))] or [Label()]:
            for text in tuple(self.wholes(key, label)) or (ids(),):
                self.add(text)

    def add(self, ids: Iterable[int]) -> None:
        self.needles.add(_packed(ids))

    def within(self, ids: Iterable[int]) -> bool:
        """Whether one of the texts stands somewhere in ``ids``."""
        hay = _packed(ids)
        return any(_stands_in(needle, hay) for needle in self.needles)

    def doom(self, ids: Iterable[int], labels: Iterable[Label]) -> bool:
        """Whether something of these tokens and labels has to go."""
        labels = tuple(labels)
        return self.wanted.fits(labels) or (self.wanted.reaches(labels) and self.within(ids))


def _packed(ids: Iterable[int]) -> bytes:
    return np.fromiter(ids, dtype="<i4").tobytes()


def _stands_in(needle: bytes, hay: bytes) -> bool:
    """Whether ``needle`` stands in ``hay`` at a multiple of four bytes."""
    place = hay.find(needle) if needle else -1
    while place >= 0 and place % 4:
        place = hay.find(needle, place + 1)
    return place >= 0
