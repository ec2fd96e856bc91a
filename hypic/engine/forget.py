"""Forgetting texts: entries, snapshots that hold them, encodes and requests under way. On the engine's own thread.

A text is forgotten by its labels, and with it everything whose tokens hold its tokens, whatever that is called: after
a text is forgotten nothing that is kept has it in it. Where a namespace is given this holds within it: what others hold
is theirs. Requests that run keep what they use to their end, and leave nothing behind. Not here: known texts in flat prompts (``registry``) and passages of an index (``LLM.attach``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hypic.engine.engine import Engine
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment, Label, label_of
from hypic.types import Forgotten


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


@dataclass
class Texts:
    """Token ids of forgotten texts, found again inside others."""

    wanted: Wanted
    needles: set[bytes] = field(default_factory=set)

    def add(self, ids: tuple[int, ...]) -> None:
        self.needles.add(_packed(ids))

    def doom(self, ids: tuple[int, ...], labels: Iterable[Label]) -> bool:
        """Whether something of these tokens and labels has to go."""
        labels = tuple(labels)
        return self.wanted.fits(labels) or (self.wanted.reaches(labels) and self.within(ids))

    def within(self, ids: tuple[int, ...]) -> bool:
        """Whether one of the texts stands somewhere in ``ids``."""
        hay = _packed(ids)
        return any(_stands_in(needle, hay) for needle in self.needles)


def forget(engine: Engine, wanted: Wanted) -> tuple[Forgotten, Texts]:
    """Drops what is meant; how much of what, and the texts that went."""
    texts, found = Texts(wanted), list(engine.store)
    for entry in (*found, *_under_way(engine)):
        if not entry.is_snapshot and wanted.fits(entry.labels):
            texts.add(entry.ids)
    for planned in (planned for request in _requests(engine) for planned in request.prompt.segments):
        if wanted.fits({label_of(planned.segment)}):
            texts.add(planned.ids)
    doomed = [entry for entry in found if texts.doom(entry.ids, entry.labels)]
    for entry in doomed:
        if engine.kept.pop(entry.key, None) is not None:
            engine.store.unpin(entry)
        engine.store.forget(entry)
    for entry in _under_way(engine):
        entry.is_forgotten |= texts.doom(entry.ids, entry.labels)
    for request in _requests(engine):
        prompt = request.prompt
        request.is_forgotten |= texts.doom(prompt.ids, prompt.labels(len(prompt.ids)))
    engine.heads.clear()
    engine.admission.history.forget(wanted.fits)
    num_snapshots = sum(entry.is_snapshot for entry in doomed)
    return Forgotten(len(doomed) - num_snapshots, num_snapshots), texts


def _under_way(engine: Engine) -> Iterator[CachedSegment]:
    return (job.entry for job in engine.admission.encoding.values())


def _requests(engine: Engine) -> Iterator[Request]:
    yield from engine.scheduler.running.values()
    yield from engine.scheduler.waiting


def _packed(ids: tuple[int, ...]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _stands_in(needle: bytes, hay: bytes) -> bool:
    """Whether ``needle`` stands in ``hay`` at a multiple of four bytes."""
    place = hay.find(needle) if needle else -1
    while place >= 0 and place % 4:
        place = hay.find(needle, place + 1)
    return place >= 0
