"""A store made of stores: the device's entries, and below them tiers in host memory, on disk or elsewhere.

Read-through: what the device lacks is looked for below and loaded, unless encoding it is cheaper. A hit promotes, into
the host tier on its way and into the device. What the device evicts is demoted into the host tier, and what is new is
written behind, when there is nothing else to do, into tiers that outlive the process. Snapshots stay on the device:
they share its pages, and every turn of a conversation would be written out whole.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torch import Tensor

from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.store import encoding, image
from hypic.engine.store.costs import Costs
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.disk import DiskTier
from hypic.engine.store.expiry import is_over
from hypic.engine.store.fetching import Choice, Fetching
from hypic.engine.store.header import About
from hypic.engine.store.threads import Writer
from hypic.engine.store.tier import Stored, Tier, TierStats

__all__ = ["Choice", "Tiered"]
CLOSE_S = 10.0


class Tiered(Fetching):
    """``tiers`` from the fastest to the slowest. All methods are the engine's thread's.

    At most ``stage_bytes`` that were read ahead wait to be asked for, and ``queue_bytes`` to be written.
    """

    def __init__(
        self,
        device: DeviceStore,
        identity: Identity,
        tiers: Sequence[Tier] = (),
        costs: Costs | None = None,
        stage_bytes: int = 2**30,
        queue_bytes: int = 2**30,
    ) -> None:
        costs = costs if costs is not None else Costs()
        super().__init__(device.pool, identity, tiers, costs, Writer(queue_bytes), stage_bytes)
        self.device = device
        self._unsaved: OrderedDict[bytes, CachedSegment] = OrderedDict()
        self._outdated: set[bytes] = set()  # among these: what was being written when it got another name
        if self.tiers:
            device.leaving = self._leaving

    # -- up to down --------------------------------------------------------------------------------------------------

    def made(self, entry: CachedSegment) -> None:
        """A new entry is in the device's store: it is to be saved when there is time."""
        self._reasons.pop(entry.key, None)
        if not entry.is_trial and any(tier.blocks for tier in self.tiers):
            self._unsaved[entry.key] = entry

    def tend(self) -> bool:
        """Save one entry, or wait a moment for room in the queue of writes; whether there was one."""
        while self._unsaved:
            key, entry = next(iter(self._unsaved.items()))
            if key in self._outdated:
                if not self._withdraw(key):
                    self.writer.drain(0.01)
                    return True
                self.made(entry)
            if self.device.find(key) is not entry or self._is_saved(key):
                del self._unsaved[key]
                continue
            if not self.writer.has_room(entry.num_bytes):
                self.writer.drain(0.01)
                return True
            del self._unsaved[key]
            self.keep(key, self._exported(entry))
            return True
        return False

    def keep(self, key: bytes, buffer: Tensor) -> None:
        """Write an encoded entry, behind what runs, into every tier that blocks and lacks it."""
        lacking = [tier for tier in self.tiers if tier.blocks and key not in tier]
        if lacking:
            self.writer.submit(lacking, key, buffer)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Save what is not saved yet, as far as that time goes, and end the threads."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.tend():
            pass
        self.writer.close(max(0.0, deadline - time.monotonic()))
        self.reader.close()
        for tier in self.tiers:
            tier.close()

    # -- all tiers ---------------------------------------------------------------------------------------------------

    def remove(self, key: bytes) -> int:
        """Forget an entry below the device, and on its way there or back; in how many places it was."""
        self._unsaved.pop(key, None)
        self._outdated.discard(key)
        pending = self._pending.get(key)
        if pending is not None:
            pending.is_unwanted = True
        if pending is not None and not pending.is_claimed:
            del self._pending[key]
        return self.writer.discard(key) + sum(tier.remove(key) for tier in self.tiers)

    def renamed(self, entry: CachedSegment) -> None:
        """An entry may have got a label or a time since it was written: then it is written anew. While it is being
        written this waits for ``tend``, so that no request waits for the disk."""
        if self.tiers and self.device.find(entry.key) is entry and self._is_outdated(entry):
            if not self._withdraw(entry.key):
                self._outdated.add(entry.key)
            self.made(entry)

    def expire(self, key: bytes) -> None:
        """Remove an entry from the tiers in which its time is over, whatever those say that are to be written anew."""
        entry = self._unsaved.get(key)
        if entry is not None and is_over(entry):
            self.remove(key)
        for tier in self.tiers:
            stored = tier.find(key)
            if stored is not None and stored.expires_s is not None and stored.expires_s <= time.time():
                self.remove(key)

    def is_queued(self, key: bytes) -> bool:
        """Whether an entry is about to be written."""
        return key in self.writer

    def in_memory(self) -> Iterator[image.EntryImage]:
        """What the host holds: in tiers that do not block, and about to be written."""
        held = [tier.get(stored.key) for tier in self.tiers if not tier.blocks for stored in tier.entries()]
        queued = [buffer for _, buffer in self.writer.waiting()]
        yield from (encoding.decode(buffer, verify=False) for buffer in (*held, *queued) if buffer is not None)

    def on_disk(self) -> list[DiskTier]:
        """Tiers whose files outlive the process."""
        return [tier for tier in self.tiers if isinstance(tier, DiskTier)]

    @property
    def stats(self) -> dict[str, TierStats]:
        return {tier.name: tier.stats for tier in self.tiers}

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _is_saved(self, key: bytes) -> bool:
        return key in self.writer or all(key in tier for tier in self.tiers if tier.blocks)

    def _is_outdated(self, entry: CachedSegment) -> bool:
        """Whether a tier, or the queue of writes, knows an entry by other labels or another time."""
        known: list[Stored | About] = [s for tier in self.tiers if (s := tier.find(entry.key)) is not None]
        queued = self.writer.peek(entry.key)
        if queued is not None:
            known.append(encoding.decode_about(queued))
        return any(about.labels != entry.labels or about.expires_s != entry.expires_s for about in known)

    def _withdraw(self, key: bytes) -> bool:
        """Remove an entry below the device, unless it is being written right now; whether it is gone."""
        is_free = self.writer.withdraw(key)
        if is_free:
            self.remove(key)
        return is_free

    def _exported(self, entry: CachedSegment) -> Tensor:
        found = image.view(self.pool, entry, self.identity)
        return encoding.encode(found, pin=self._side is not None, has_checksum=False)

    def _leaving(self, entry: CachedSegment) -> None:
        """The device evicts an entry."""
        key = entry.key
        self._unsaved.pop(key, None)
        if entry.is_snapshot or entry.is_trial:
            return
        if key in self._outdated:
            self.remove(key)  # rarely waits for a write: who is forgotten by a label must be known by it
        faster = [tier for tier in self.tiers if not tier.blocks and key not in tier]
        if not faster and self._is_saved(key):
            return
        if not faster and not self.writer.has_room(entry.num_bytes):
            self.writer.num_dropped += 1
            return
        buffer = self._exported(entry)
        for tier in faster:
            tier.put(key, buffer)
        self.keep(key, buffer)
