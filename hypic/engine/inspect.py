"""Questions to an engine, asked on its own thread between two steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypic.engine.engine import Engine
from hypic.engine.segment import CachedSegment
from hypic.engine.store.texts import Wanted
from hypic.types import CachedEntry


def entries(engine: Engine) -> list[CachedEntry]:
    """What the store holds."""
    return [_listed(engine, entry) for entry in engine.store]


def pin(engine: Engine, *, wanted: Wanted) -> int:
    """Keep the entries of texts that are meant; how many were not kept before."""
    fresh = [e for e in engine.store if not e.is_snapshot and e.key not in engine.kept and wanted.fits(e.labels)]
    for entry in fresh:
        engine.store.pin(entry)
        engine.kept[entry.key] = entry
    return len(fresh)


def unpin(engine: Engine, *, wanted: Wanted) -> int:
    """Let entries go that ``pin`` kept; how many."""
    kept = [entry for entry in engine.kept.values() if wanted.fits(entry.labels)]
    for entry in kept:
        engine.store.unpin(engine.kept.pop(entry.key))
    return len(kept)


def flush(engine: Engine) -> bool:
    """Write some of what is not written yet; whether there may be more."""
    return False


def _listed(engine: Engine, entry: CachedSegment) -> CachedEntry:
    pairs = sorted({(label.name, label.source) for label in entry.labels}, key=lambda pair: [x or "" for x in pair])
    spaces = {label.namespace for label in entry.labels}
    return CachedEntry(
        key=entry.key.hex(),
        kind="snapshot" if entry.is_snapshot else "segment",
        tier="device",
        num_tokens=len(entry.ids),
        num_bytes=entry.num_bytes,
        labels=tuple(pair for pair in pairs if pair != (None, None)),
        namespaces=tuple(sorted(space for space in spaces if space is not None)),
        num_hits=entry.num_hits,
        is_pinned=entry.key in engine.kept,
        expires_s=entry.expires_s,
    )


def stats(engine: Engine) -> dict[str, Any]:
    """Counters and sizes: the store's, the pool's, requests waiting and running."""
    pool, scheduler = engine.runner.pool, engine.scheduler
    layout = pool.layout
    return {
        "entry": {"map_bytes": layout.state_bytes + layout.transition_bytes, "token_bytes": layout.token_bytes},
        "store": asdict(engine.store.stats),
        "pool": {"num_bytes": pool.num_bytes, "capacity": asdict(pool.capacity), "free": asdict(pool.free)},
        "requests": {"waiting": len(scheduler.waiting) + len(engine.heads), "running": len(scheduler.running)},
        "weight_bytes": engine.runner.weight_bytes,
        "max_context": engine.runner.max_context,
    }
