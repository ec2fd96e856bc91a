"""From the tiers up to the device: what is fetched for whom, and whether encoding it would be cheaper.

A fetch is read by a thread where its tier blocks, checked there, and promoted into the tiers above its own; then it is
copied into pages and slots, on a GPU by a stream of its own. Whatever goes wrong on the way makes it a miss.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.pool import Pool
from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.store import encoding, image
from hypic.engine.store.costs import Costs
from hypic.engine.store.threads import Pending, Reader, Writer
from hypic.engine.store.tier import Stored, Tier
from hypic.errors import StoreCorrupt

logger = logging.getLogger("hypic")
MAX_REASONS = 1000


@dataclass(frozen=True)
class Choice:
    """What to do for an entry that the device lacks: wait for ``pending``, or encode it, for ``reason`` if any."""

    pending: Pending | None = None
    reason: str = ""


class Fetching:
    """At most ``stage_bytes`` that were read ahead wait to be asked for; what ``writer`` is about to write is there."""

    def __init__(
        self, pool: Pool, identity: Identity, tiers: Sequence[Tier], costs: Costs, writer: Writer, stage_bytes: int
    ) -> None:
        self.pool, self.identity, self.tiers, self.costs = pool, identity, tuple(tiers), costs
        self.writer, self.stage_bytes = writer, stage_bytes
        self.reader = Reader(self._read)
        self._pending: OrderedDict[bytes, Pending] = OrderedDict()
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        is_cuda = self.pool.device.type == "cuda"
        self._side = torch.cuda.Stream(self.pool.device) if is_cuda else None  # type: ignore[no-untyped-call]

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
            pending.began = time.perf_counter()
            pending.event = self._copy(pending, pending.image, entry)
        if isinstance(pending.event, torch.cuda.Event) and not pending.event.query():  # type: ignore[no-untyped-call]
            return False
        self.costs.install.see(pending.num_bytes, _seconds_of(pending))
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

    def _copy(self, pending: Pending, found: image.EntryImage, entry: CachedSegment) -> object:
        """On a GPU behind what runs now, beside what runs next; the event tells when."""
        if self._side is None:
            image.install(self.pool, found, entry)
            return time.perf_counter()
        self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
        pending.began, event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            pending.began.record(self._side)
            image.install(self.pool, found, entry)
            event.record(self._side)
        return event


def _seconds_of(pending: Pending) -> float:
    """What the copies into the device took, once they are over."""
    if isinstance(pending.event, torch.cuda.Event) and isinstance(pending.began, torch.cuda.Event):
        return float(pending.began.elapsed_time(pending.event)) / 1e3
    assert isinstance(pending.event, float) and isinstance(pending.began, float), "the host's clock was read"
    return pending.event - pending.began
