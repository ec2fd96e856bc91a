"""Forgetting texts: entries, snapshots that hold them, encodes and requests under way. On the engine's own thread.

A text is forgotten by its labels, and with it everything whose tokens hold its tokens, whatever that is called: after
a text is forgotten nothing that is kept has it in it. Where a namespace is given this holds within it: what others
hold is theirs. Requests that run keep what they use to their end, and leave nothing behind. Not here: known texts in
flat prompts (``registry``) and passages of an index (``LLM.attach``).
"""

from __future__ import annotations

from collections.abc import Iterator

from hypic.engine.engine import Engine
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment, label_of
from hypic.engine.store.texts import Texts, Wanted
from hypic.types import Forgotten


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
    jobs = engine.admission.jobs
    yield from (job.entry for job in jobs.encoding.values())
    yield from (job.entry for job in jobs.loading.values())


def _requests(engine: Engine) -> Iterator[Request]:
    yield from engine.scheduler.running.values()
    yield from engine.scheduler.waiting
