"""On a GPU: entries leave over pinned memory and come back on a stream of their own, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hypic.engine.pool import Pool
from hypic.engine.store import image
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.disk import DiskTier
from hypic.engine.store.host import HostTier
from hypic.engine.store.tiered import Tiered
from tests.engine.store.conftest import IDENTITY, LAYOUT, make_entry, same_images


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_entries_travel_over_pinned_memory(tier: str, tmp_path: Path) -> None:
    pool = Pool(LAYOUT, 2**20, 4, 64, 4, torch.device("cuda"))
    device = DeviceStore(pool, None)
    host, disk = HostTier(2**22, pin=True), DiskTier(tmp_path, 2**24, IDENTITY)
    store = Tiered(device, IDENTITY, [host, disk])
    store.costs.encode.unit_s = 1e3
    entry = make_entry(pool, 1, 40)
    truth = image.export(pool, entry, IDENTITY)
    device.put(entry)
    device.demote_all()
    buffer = host.get(entry.key)
    assert buffer is not None and buffer.is_pinned() and store.writer.drain(30.0)
    if tier == "disk":
        host.remove(entry.key)
    for tensor in (*pool.keys, *pool.values, *pool.states, *pool.tails, *pool.transitions):
        tensor.normal_()
    pending = store.choose(entry.key, entry.ids).pending
    assert pending is not None and pending.tier.name == tier
    pending.is_claimed, again, deadline = True, image.take(pool, truth), time.monotonic() + 30.0
    while not store.install(pending, again):
        assert time.monotonic() < deadline
        store.wait(0.01)
    assert isinstance(pending.event, torch.cuda.Event) and store.costs.install.unit_s is not None
    assert same_images(image.export(pool, again, IDENTITY), truth) and entry.key in host
    store.close()
