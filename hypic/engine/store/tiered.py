"""A store made of stores: the device's entries, and below them tiers in host memory, on disk or elsewhere.

Read-through: what the device lacks is looked for below and loaded, unless encoding it is cheaper. A hit promotes, into
the host tier on its way and into the device. What the device evicts is demoted into the host tier, and what is new is
written behind, when there is nothing else to do, into tiers that outlive the process. Snapshots stay on the device:
they share its pages, and every turn of a conversation would be written out whole.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.store import encoding, image
from hypic.engine.store.costs import Costs
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.threads import Pending, Reader, Writer
from hypic.engine.store.tier import Stored, Tier, TierStats
from hypic.errors import StoreCorrupt

logger = logging.getLogger("hypic")
MAX_REASONS = 1000
CLOSE_S = 10.0


@dataclass(frozen=True)
class Choice:
    """What to do for an entry that the device lacks: wait for ``pending``, or encode it, for ``reason`` if any."""

    pending: Pending | None = None
    reason: str = ""


class Tiered:
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
        self.device, self.pool, self.identity, self.tiers = device, device.pool, identity, tuple(tiers)
        self.costs, self.stage_bytes = costs if costs is not None else Costs(), stage_bytes
        self.reader, self.writer = Reader(self._read), Writer(queue_bytes)
        self._pending: OrderedDict[bytes, Pending] = OrderedDict()
        self._unsaved: OrderedDict[bytes, CachedSegment] = OrderedDict()
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        is_cuda = self.pool.device.type == "cuda"
        self._side = torch.cuda.Stream(self.pool.device) if is_cuda else None  # type: ignore[no-untyped-call]
        if self.tiers:
            device.leaving = self._leaving

    # -- down to up --------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Tier, Stored] | None:
        """The first tier that has an entry which has not expired."""
        for tier in self.tiers:
            stored = tier.find(key)
            if stored is not None and stored.expires_s is not None and stored.expires_s <= time.time():
                tier.remove(key)
            elif stored is not None:
                return tier, stored
        return None

    def choose(self, key: bytes, ids: tuple[int, ...]) -> Choice:
        """Load or encode; what is to be loaded begins to be read."""
        if not self.tiers or key in self._reasons:
            return Choice(None, self._reasons.get(key, ""))
        pending = self._pending.get(key) or self._on_its_way(key, ids)
        if pending is not None and not pending.is_lost and (pending.is_over or not pending.is_extra):
            return Choice(pending)
        found = self.find(key)
        if found is None:
            return Choice()
        tier, stored = found
        ahead = self.reader.num_bytes if tier.blocks and pending is None else 0
        reason = self.costs.objection(tier.name, stored.num_bytes, stored.num_tokens, ahead)
        # An idle reader reads even what is not worth waiting for: speeds change, and the host tier may take it in.
        is_extra = bool(reason)
        if pending is None and (not is_extra or (tier.blocks and ahead == 0)):
            pending = self._fetch(Pending(key, ids, tier, stored.num_bytes, is_extra=is_extra))
        if pending is None or is_extra:
            return Choice(None, reason)
        pending.is_extra = False
        return Choice(pending)

    def install(self, pending: Pending, entry: CachedSegment) -> bool:
        """Move what has been read into an entry's pages and slots; whether that is over, or the entry is lost."""
        if not pending.is_over or pending.image is None:
            return pending.is_over
        if pending.event is None:
            pending.began_s = time.perf_counter()
            pending.event = self._copy(pending.image, entry)
        if isinstance(pending.event, torch.cuda.Event) and not pending.event.query():  # type: ignore[no-untyped-call]
            return False
        self.costs.install.see(pending.num_bytes, time.perf_counter() - pending.began_s)
        entry.labels |= pending.image.labels
        times = [time_s for time_s in (entry.expires_s, pending.image.expires_s) if time_s is not None]
        entry.expires_s = min(times, default=None)
        self._pending.pop(pending.key, None)
        return True

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for it any more; what the device copies is waited for, since its slots are given back."""
        if isinstance(pending.event, torch.cuda.Event):
            pending.event.synchronize()
        if pending.is_lost:
            self._note(pending.key, "lost")
        self._pending.pop(pending.key, None)

    def wait(self, timeout_s: float) -> None:
        """Until something that is being fetched may have arrived."""
        copies = [p.event for p in self._pending.values() if isinstance(p.event, torch.cuda.Event)]
        if copies:
            copies[0].synchronize()
        else:
            self.reader.wait(timeout_s)

    # -- up to down --------------------------------------------------------------------------------------------------

    def made(self, entry: CachedSegment) -> None:
        """A new entry is in the device's store: it is to be saved when there is time."""
        self._reasons.pop(entry.key, None)
        if any(tier.blocks for tier in self.tiers):
            self._unsaved[entry.key] = entry

    def tend(self) -> bool:
        """Save one entry, or wait a moment for room in the queue of writes; whether there was one."""
        while self._unsaved:
            key, entry = next(iter(self._unsaved.items()))
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
        pending = self._pending.get(key)
        if pending is not None:
            pending.is_unwanted = True
        if pending is not None and not pending.is_claimed:
            del self._pending[key]
        return self.writer.discard(key) + sum(tier.remove(key) for tier in self.tiers)

    def forget(self, fits: Callable[[Stored], bool]) -> dict[str, int]:
        """Remove all entries that fit, below the device; how many of each tier, and of those about to be written."""
        queued = [Stored.of(encoding.decode_about(buffer), len(buffer)) for _, buffer in self.writer.waiting()]
        counts = {"queued": sum(self.writer.discard(stored.key) for stored in queued if fits(stored))}
        for tier in self.tiers:
            keys = [stored.key for stored in tier.entries() if fits(stored)]
            counts[tier.name] = len(keys)
            for key in keys:
                self.remove(key)
        return counts

    @property
    def stats(self) -> dict[str, TierStats]:
        return {tier.name: tier.stats for tier in self.tiers}

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _fetch(self, pending: Pending) -> Pending:
        self._trim()
        self._pending[pending.key] = pending
        if pending.tier.blocks:
            self.reader.submit(pending)
        else:
            self._read(pending)
            pending.is_over = True
        return pending

    def _trim(self) -> None:
        """Forget what was read ahead and not asked for, oldest first, where it is too much."""
        waiting = [p for p in self._pending.values() if p.is_over and not p.is_claimed]
        held = sum(pending.num_bytes for pending in waiting)
        for pending in waiting:
            if held <= self.stage_bytes and not pending.is_lost:
                return
            held -= pending.num_bytes
            del self._pending[pending.key]

    def _on_its_way(self, key: bytes, ids: tuple[int, ...]) -> Pending | None:
        """An entry that is about to be written is read from the queue."""
        buffer = self.writer.peek(key)
        if buffer is None:
            return None
        pending = Pending(key, ids, self.tiers[0], len(buffer), encoding.decode(buffer, verify=False), is_over=True)
        self._pending[key] = pending
        return pending

    def _read(self, pending: Pending) -> None:
        """On the reader's thread for tiers that block."""
        began = time.perf_counter()
        buffer = pending.tier.get(pending.key)
        if buffer is None:
            self._note(pending.key, "corrupt or gone")
            return
        try:
            found = encoding.decode(buffer, verify=False)
            image.check(found, self.pool.layout, self.identity)
            if found.ids != pending.ids:
                raise StoreCorrupt(f"the entry {found.key.hex()[:16]} holds other tokens.")
        except StoreCorrupt as error:
            logger.warning("the %s tier holds an entry that cannot be used: %s", pending.tier.name, error)
            pending.tier.remove(pending.key)
            self._note(pending.key, "corrupt")
            return
        pending.image = self._promoted(pending, buffer) if pending.tier.blocks else found
        if pending.tier.blocks:
            self.costs.see_read(pending.tier.name, len(buffer), time.perf_counter() - began)

    def _promoted(self, pending: Pending, buffer: Tensor) -> image.EntryImage:
        """The entry, in memory that the device copies from, and in the tiers above its own."""
        held = torch.empty(len(buffer), dtype=torch.uint8, pin_memory=self._side is not None)
        held.copy_(buffer)
        for tier in self.tiers:
            if tier is pending.tier:
                break
            tier.put(pending.key, held)
            if pending.is_unwanted:
                tier.remove(pending.key)
        return encoding.decode(held, verify=False)

    def _note(self, key: bytes, reason: str) -> None:
        """Why an entry is not to be loaded until it has been made again."""
        self._reasons.setdefault(key, reason)
        while len(self._reasons) > MAX_REASONS:
            self._reasons.popitem(last=False)

    def _copy(self, found: image.EntryImage, entry: CachedSegment) -> object:
        """On a GPU behind what runs now, beside what runs next; the event tells when."""
        if self._side is None:
            image.install(self.pool, found, entry)
            return True
        self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self._side):
            image.install(self.pool, found, entry)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return event

    def _is_saved(self, key: bytes) -> bool:
        return key in self.writer or all(key in tier for tier in self.tiers if tier.blocks)

    def _exported(self, entry: CachedSegment) -> Tensor:
        return encoding.encode(image.export(self.pool, entry, self.identity), pin=self._side is not None)

    def _leaving(self, entry: CachedSegment) -> None:
        """The device evicts an entry."""
        key = entry.key
        self._unsaved.pop(key, None)
        faster = [tier for tier in self.tiers if not tier.blocks and key not in tier]
        if entry.is_snapshot or (not faster and self._is_saved(key)):
            return
        if not faster and not self.writer.has_room(entry.num_bytes):
            self.writer.num_dropped += 1
            return
        buffer = self._exported(entry)
        for tier in faster:
            tier.put(key, buffer)
        self.keep(key, buffer)
