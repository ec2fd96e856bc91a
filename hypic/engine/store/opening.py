"""The tiers of a specification, opened: what they hold and how fast they are is known before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from hypic.engine.pool import Pool
from hypic.engine.segment import Identity
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.disk import DiskTier
from hypic.engine.store.host import HostTier
from hypic.engine.store.tier import Tier
from hypic.engine.store.tiered import Tiered
from hypic.store_spec import TierSpec

logger = logging.getLogger("hypic")
PROBE_BYTES = 2**24


def open_store(device: DeviceStore, identity: Identity, specs: Sequence[TierSpec]) -> Tiered:
    """A store with the tiers that ``specs`` name; a budget that can hold nothing is warned of."""
    pool = device.pool
    tiers = [_opened(spec, pool, identity) for spec in specs]
    store = Tiered(device, identity, tiers)
    for tier in tiers:
        _warn_if_too_small(tier.name, tier.budget_bytes, pool)
        if isinstance(tier, HostTier):
            tier.leaving = store.keep
    if device.budget_bytes:
        _warn_if_too_small("device", device.budget_bytes, pool)
    if tiers:
        _measure(store)
    return store


def _opened(spec: TierSpec, pool: Pool, identity: Identity) -> Tier:
    if spec.scheme == "host":
        return HostTier(spec.budget_bytes, pin=pool.device.type == "cuda")
    assert spec.path is not None, "a disk tier has a path"
    return DiskTier(spec.path, spec.budget_bytes, identity)


def _warn_if_too_small(name: str, budget_bytes: int, pool: Pool) -> None:
    map_bytes = pool.layout.state_bytes + pool.layout.transition_bytes
    least = map_bytes + pool.page_bytes
    if budget_bytes < least:
        typical = map_bytes + pool.pages_for(pool.segment_tokens) * pool.page_bytes
        logger.warning(
            "the %s tier of %d bytes can hold nothing: an entry of this model takes %d bytes or more, and one of %d "
            "tokens %d; give it a larger size.",
            name,
            budget_bytes,
            least,
            pool.segment_tokens,
            typical,
        )


def _measure(store: Tiered) -> None:
    """How fast bytes come from the host, and, where a tier holds something, from it."""
    device, costs = store.pool.device, store.costs
    source = torch.ones(PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    for _ in range(2):  # the first time memory is touched says nothing about the next
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        costs.install.unit_s = (time.perf_counter() - began) / PROBE_BYTES
    for tier in store.tiers:
        largest = max(tier.entries(), key=lambda stored: stored.num_bytes, default=None) if tier.blocks else None
        if largest is not None:
            began = time.perf_counter()
            if (buffer := tier.get(largest.key)) is not None:
                buffer.clone()
                costs.see_read(tier.name, len(buffer), time.perf_counter() - began)
