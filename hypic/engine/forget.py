"""Forgetting texts: entries, snapshots that hold them, encodes and requests under way. On the engine's own thread.

A text is forgotten by its labels, and with it everything whose tokens hold its tokens, whatever that is called: after
a text is forgotten nothing that is kept has it in it. Where a namespace is given this holds within it: what others
hold is theirs. Requests that run keep what they use to their end, and leave nothing behind. Not here: known texts in
flat prompts (``registry``) and passages of an index (``LLM.attach``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from hypic.engine.engine import Engine
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment, label_of
from hypic.engine.store import erasing
from hypic.engine.store.texts import Texts, Wanted
from hypic.kept import Forgotten


def forget(engine: Engine, wanted: Wanted, also: Iterable[bytes] = ()) -> tuple[Forgotten, Texts]:
    """Drops what is meant, and texts (as ``Texts.needles``) that are meant elsewhere; how much of what, and all that
    went."""
    texts = _gathered(engine, wanted)
    texts.needles |= set(also)
    doomed = [entry for entry in engine.store if texts.doom(entry.ids, entry.labels)]
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
    below, num_queued, num_files = _forget_below(engine, texts)
    keys = {entry.key for entry in doomed if not entry.is_snapshot} | below
    return Forgotten(len(keys), sum(entry.is_snapshot for entry in doomed), num_files, num_queued), texts


def _gathered(engine: Engine, wanted: Wanted) -> Texts:
    """The tokens of all texts that are meant, wherever one stands under its label."""
    texts = Texts(wanted, wholes=engine.admission.history.wholes)
    for entry in (*engine.store, *_under_way(engine)):
        if not entry.is_snapshot:
            texts.take(entry.key, entry.labels, partial(tuple, entry.ids))
    for planned in (planned for request in _requests(engine) for planned in request.prompt.segments):
        if wanted.fits({label_of(planned.segment)}):
            texts.add(planned.ids)
    for image in engine.tiers.in_memory():
        texts.take(image.key, image.labels, partial(tuple, image.ids))
    for tier in engine.tiers.on_disk():
        erasing.gather(tier.folder, texts)
    return texts


def _forget_below(engine: Engine, texts: Texts) -> tuple[set[bytes], int, int]:
    """In the tiers below the device: keys that went, writes that were waiting, and files."""
    tiers, keys, num_queued, num_files = engine.tiers, set[bytes](), 0, 0
    for image in tiers.in_memory():
        if texts.doom(image.ids, image.labels):
            num_queued += tiers.is_queued(image.key)
            tiers.remove(image.key)
            keys.add(image.key)
    for tier in tiers.on_disk():
        gone = erasing.erase(tier.folder, texts)
        num_files += len(gone)
        keys.update(gone)
        for key in gone:
            tiers.remove(key)
        if not texts.wanted.is_all:
            num_files += sum(_forget_of_others(Path(folder), texts.wanted) for folder in tier.foreign_folders())
    return keys, num_queued, num_files


def _forget_of_others(folder: Path, wanted: Wanted) -> int:
    """Files of another model, whose token ids are others."""
    texts = Texts(wanted)
    erasing.gather(folder, texts)
    return len(erasing.erase(folder, texts))


def _under_way(engine: Engine) -> Iterator[CachedSegment]:
    jobs = engine.admission.jobs
    yield from (job.entry for job in jobs.encoding.values())
    yield from (job.entry for job in jobs.loading.values())


def _requests(engine: Engine) -> Iterator[Request]:
    yield from engine.scheduler.running.values()
    yield from engine.scheduler.waiting
