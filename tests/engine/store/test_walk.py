"""A random walk against a model of the store: index, pools and budgets agree after every operation."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from hypic.engine.pool import Pool
from hypic.engine.segment import CachedSegment
from hypic.engine.sizing import Need
from hypic.engine.store import image
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.disk import DiskTier
from hypic.engine.store.host import HostTier
from hypic.engine.store.image import EntryImage
from hypic.engine.store.threads import Pending
from hypic.engine.store.tiered import Tiered
from tests.engine.store.conftest import IDENTITY, LAYOUT, make_entry, make_image, make_pool, same_images

NUM_KEYS = 24


class Walk:
    """The real store, and beside it the little that must be true of it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.truth = {number: make_image(number, 9 + number) for number in range(NUM_KEYS)}
        self.number = {found.key: number for number, found in self.truth.items()}
        self.pool = Pool(LAYOUT, 2**17, 4, 64, 2, torch.device("cpu"))
        self.device = DeviceStore(self.pool, 40_000)
        self.host = HostTier(12_000)
        self.disk = DiskTier(root, 80_000, IDENTITY)
        self.store = Tiered(self.device, IDENTITY, [self.host, self.disk], queue_bytes=20_000)
        self.host.leaving = self.store.keep
        self.store.costs.encode.unit_s = 1e3
        self.pins: dict[bytes, int] = {}
        self.loads: dict[bytes, tuple[Pending, CachedSegment]] = {}
        self.counts = dict.fromkeys(
            ("insert", "hit", "pin", "unpin", "evict", "promote", "demote", "abort", "remove", "tend", "room"), 0
        )

    def step(self) -> None:
        action = self.rng.choice(list(self.counts))
        self.counts[action] += bool(getattr(self, action)(self.rng.randrange(NUM_KEYS)))

    # -- operations --------------------------------------------------------------------------------------------------

    def insert(self, number: int) -> bool:
        found = self.truth[number]
        if (
            found.key in self.device
            or found.key in self.loads
            or not self.device.make_room(image.need(self.pool, found))
        ):
            return False
        entry = image.take(self.pool, found)
        image.install(self.pool, found, entry)
        self.device.put(entry)
        self.store.made(entry)
        return True

    def hit(self, number: int) -> bool:
        found = self.truth[number]
        entry = self.device.get(found.key, found.ids)
        if entry is None:
            return False
        assert same_images(image.export(self.pool, entry, IDENTITY), found)
        assert self.device.get(found.key, (1, 2)) is None
        return True

    def pin(self, number: int) -> bool:
        entry = self.device.find(self.truth[number].key)
        if entry is None or sum(self.pins.values()) > 6:
            return False
        self.device.pin(entry)
        self.pins[entry.key] = self.pins.get(entry.key, 0) + 1
        return True

    def unpin(self, number: int) -> bool:
        if not self.pins:
            return False
        key = self.rng.choice(list(self.pins))
        entry = self.device.find(key)
        assert entry is not None, "a pinned entry is never gone"
        self.device.unpin(entry)
        self.pins[key] -= 1
        self.pins = {key: count for key, count in self.pins.items() if count}
        return True

    def evict(self, number: int) -> bool:
        return self.device._evict(self.rng.choice(["bytes", "pages", "states", "transitions"]))

    def demote(self, number: int) -> bool:
        key = self.truth[number].key
        while self.store.reader.num_bytes:  # what it promotes may push others out
            time.sleep(0.0005)
        was_there = key in self.device and key not in self.pins
        evictions, host = self.device.stats.evictions, key in self.host
        while was_there and key in self.device:
            assert self.device._evict("states")
        if was_there and not host and self.device.stats.evictions == evictions + 1:
            assert key in self.host, "what left last is in the host tier"
        return was_there

    def promote(self, number: int) -> bool:
        found = self.truth[number]
        if found.key in self.device or found.key in self.loads:
            return False
        choice = self.store.choose(found.key, found.ids)
        if choice.pending is None or not self.device.make_room(image.need(self.pool, found)):
            return False
        choice.pending.is_claimed = True
        self.loads[found.key] = (choice.pending, image.take(self.pool, found))
        return True

    def abort(self, number: int) -> bool:
        if not self.loads:
            return False
        pending, entry = self.loads.pop(self.rng.choice(list(self.loads)))
        self.store.cancel(pending)
        self.device.release(entry)
        return True

    def remove(self, number: int) -> bool:
        key = self.truth[number].key
        if key in self.loads or key in self.pins or self.rng.random() < 0.7:
            return False
        self.device.remove(key)
        self.store.remove(key)
        assert key not in self.host and key not in self.disk and key not in self.store.writer
        return True

    def tend(self, number: int) -> bool:
        return self.store.tend()

    def room(self, number: int) -> bool:
        need = Need(self.rng.randint(0, 20), self.rng.randint(0, 3), self.rng.randint(0, 2))
        before = set(self.pins)
        has_room = self.device.make_room(need)
        assert has_room is not self.pool.lacks(need) and before <= {entry.key for entry in self.device}
        return has_room

    # -- what must be true -------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        for key, (pending, entry) in list(self.loads.items()):
            if not self.store.install(pending, entry):
                continue
            del self.loads[key]
            if pending.is_lost:
                self.store.cancel(pending)
                self.device.release(entry)
                continue
            assert same_images(image.export(self.pool, entry, IDENTITY), self.truth[self.number[key]])
            self.device.put(entry, is_new=False)

    def check(self) -> None:
        entries, loading = list(self.device), [entry for _, entry in self.loads.values()]
        owners = [*entries, *loading]
        pages = [page for entry in owners for page in entry.pages]
        assert sorted([*pages, *self.pool._pages]) == list(range(self.pool.num_pages)), "every page has one owner"
        states = [*(entry.state_slot for entry in owners), *self.pool._states]
        assert sorted(states) == list(range(1, self.pool.num_states + 1))
        transitions = [*(entry.transition_slot for entry in owners), *self.pool._transitions]
        assert sorted(transitions) == list(range(self.pool.num_transitions))  # type: ignore[type-var]
        assert {entry.key: entry.pins for entry in entries if entry.pins} == self.pins
        idle = [entry for entry in entries if not entry.pins]
        assert sum(entry.num_bytes for entry in idle) <= 40_000
        stats = self.device.stats
        assert stats.held_bytes == sum(entry.num_bytes for entry in entries) and stats.num_pinned == len(self.pins)
        assert all(len(ranking) == len(idle) for ranking in self.device._rankings.values())
        assert self.host.stats.held_bytes == sum(stored.num_bytes for stored in self.host.entries()) <= 12_000
        assert len(self.host._ranking) == self.host.stats.num_entries
        disk = self.disk.stats
        assert disk.held_bytes <= 80_000 and disk.corrupt == 0
        assert sum(len(buffer) for _, buffer in self.store.writer.waiting()) <= 20_000

    def check_bits(self) -> None:
        for tier in (self.host, self.disk):
            for stored in tier.entries():
                pending = Pending(stored.key, self.truth[self.number[stored.key]].ids, tier, stored.num_bytes)
                self.store._read(pending)
                assert pending.image is None or same_images(pending.image, self.truth[self.number[stored.key]])


@pytest.mark.parametrize("seed", [0])
def test_ten_thousand_operations_agree_with_a_model(seed: int, tmp_path: Path) -> None:
    walk = Walk(tmp_path, seed)
    for number in range(10_000):
        walk.step()
        walk.arrive()
        walk.check()
        if number % 500 == 0:
            walk.check_bits()
    assert min(walk.counts.values()) > 20, walk.counts
    assert walk.host.stats.evictions > 20 and walk.disk.stats.stored > 20 and walk.device.stats.evictions > 100
    while walk.loads:
        walk.arrive()
        time.sleep(0.001)
    for key, count in walk.pins.items():
        for _ in range(count):
            walk.device.unpin(walk.device.find(key))  # type: ignore[arg-type]
    walk.device.clear()
    assert walk.pool.free == walk.pool.capacity
    walk.store.close()


def test_the_model_would_notice() -> None:
    """An entry whose pages were given back twice, or that holds other bits, does not pass."""
    pool = make_pool()
    entry = make_entry(pool, 1, 20)
    found: EntryImage = image.export(pool, entry, IDENTITY)
    assert same_images(found, make_image(1, 20))
    pool.states[0][entry.state_slot] += 1e-3
    assert not same_images(image.export(pool, entry, IDENTITY), found)
    pool.drop_pages(entry.pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop_pages(entry.pages)
