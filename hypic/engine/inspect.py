"""Questions to an engine, asked on its own thread between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hypic.engine.engine import Engine
from hypic.engine.segment import CachedSegment, Label
from hypic.engine.store.texts import Wanted
from hypic.engine.store.tier import Stored
from hypic.kept import CachedEntry


def entries(engine: Engine) -> list[CachedEntry]:
    """What the store holds, an entry in every tier that has it."""
    below = [_below(tier.name, stored) for tier in engine.tiers.tiers for stored in tier.entries()]
    return [*(_listed(engine, entry) for entry in engine.store if not entry.is_trial), *below]


def pin(engine: Engine, *, wanted: Wanted) -> int:
    """Keep the entries of texts that are meant; how many were not kept before."""
    lasting = (entry for entry in engine.store if not entry.is_snapshot and not entry.is_trial)
    fresh = [entry for entry in lasting if entry.key not in engine.kept and wanted.fits(entry.labels)]
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
    return engine.tend() or not engine.tiers.writer.drain(0.05)


def _listed(engine: Engine, entry: CachedSegment) -> CachedEntry:
    return CachedEntry(
        key=entry.key.hex(),
        kind="snapshot" if entry.is_snapshot else "segment",
        tier="device",
        num_tokens=len(entry.ids),
        num_bytes=entry.num_bytes,
        labels=_pairs(entry.labels),
        namespaces=_spaces(entry.labels),
        num_hits=entry.num_hits,
        is_pinned=entry.key in engine.kept,
        expires_s=entry.expires_s,
    )


def _below(tier: str, stored: Stored) -> CachedEntry:
    return CachedEntry(
        key=stored.key.hex(),
        kind="snapshot" if stored.is_snapshot else "segment",
        tier=tier,
        num_tokens=stored.num_tokens,
        num_bytes=stored.num_bytes,
        labels=_pairs(stored.labels),
        namespaces=_spaces(stored.labels),
        num_hits=stored.hits,
        expires_s=stored.expires_s,
    )


def _pairs(labels: Iterable[Label]) -> tuple[tuple[str | None, str | None], ...]:
    pairs = {(label.name, label.source) for label in labels} - {(None, None)}
    return tuple(sorted(pairs, key=lambda pair: [text or "" for text in pair]))


def _spaces(labels: Iterable[Label]) -> tuple[str, ...]:
    return tuple(sorted({label.namespace for label in labels if label.namespace is not None}))


def stats(engine: Engine) -> dict[str, Any]:
    """Counters and sizes: the store's, the pool's, requests waiting and running; the primer's tokens, 0 without one,
    and those of each of its rungs; how far seams follow openings by default."""
    pool, scheduler = engine.runner.pool, engine.scheduler
    layout, rungs = pool.layout, [primer.num_cached for primer in engine.runner.primers]
    return {
        "entry": {"map_bytes": layout.state_bytes + layout.transition_bytes, "token_bytes": layout.token_bytes},
        "store": asdict(engine.store.stats),
        "tiers": {name: asdict(held) for name, held in engine.tiers.stats.items()},
        "pool": {"num_bytes": pool.num_bytes, "capacity": asdict(pool.capacity), "free": asdict(pool.free)},
        "requests": {"waiting": len(scheduler.waiting) + len(engine.heads), "running": len(scheduler.running)},
        "weight_bytes": engine.runner.weight_bytes,
        "max_context": engine.runner.max_context,
        "primer_tokens": max(rungs, default=0),
        "primer_rungs": rungs,
        "seam_opening": engine.runner.identity.seam_opening,
    }
