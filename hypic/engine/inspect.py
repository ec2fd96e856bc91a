"""Questions to an engine, asked on its own thread between two steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypic.engine.engine import Engine


def forget(engine: Engine, *, source: str | None, name: str | None, namespace: str | None) -> int:
    """Drop the idle entries that match all of what is given; how many."""
    wanted = {"source": source, "name": name, "namespace": namespace}
    given = {label: value for label, value in wanted.items() if value is not None}
    keys = [e.key for e in engine.store if all(getattr(e, label) == value for label, value in given.items())]
    return sum(engine.store.remove(key) for key in keys)


def stats(engine: Engine) -> dict[str, Any]:
    """Counters and sizes: the store's, the pool's, requests waiting and running."""
    pool, scheduler = engine.runner.pool, engine.scheduler
    return {
        "store": asdict(engine.store.stats),
        "pool": {"num_bytes": pool.num_bytes, "capacity": asdict(pool.capacity), "free": asdict(pool.free)},
        "requests": {"waiting": len(scheduler.waiting), "running": len(scheduler.running)},
        "weight_bytes": engine.runner.weight_bytes,
        "max_context": engine.runner.max_context,
    }
