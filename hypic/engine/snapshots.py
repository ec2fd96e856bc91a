"""Heads of prompts that are kept: whether one is worth a state slot, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

from hypic.engine.admission import Admission
from hypic.engine.plan import Mark
from hypic.engine.request import Request
from hypic.engine.sizing import Need
from hypic.engine.work import SnapshotTaken, Work

MIN_SNAPSHOT_TOKENS = 32


@dataclass(frozen=True)
class Snapshots:
    """Takes states for snapshots out of the pool and puts them into the store."""

    admission: Admission

    def take(self, work: Work, request: Request, mark: Mark) -> int | None:
        """A state slot for a snapshot at ``mark``, if it is worth one and memory has one to spare."""
        # Prefix reuse has nothing but snapshots, so it takes one at every border.
        least, store = MIN_SNAPSHOT_TOKENS if request.plan.policy.reuse == "segments" else 1, self.admission.store
        near = mark.position - request.last_mark < least
        if near or mark.digest in store or not store.make_room(Need(states=1)):
            return None
        request.last_mark = mark.position
        taken = SnapshotTaken(request, mark, self.admission.pool.take_state())
        work.snapshots.append(taken)
        return taken.state_slot

    def settle(self, taken: SnapshotTaken, is_broken: bool) -> None:
        """After its step: into the store, unless its request failed."""
        if is_broken:
            self.admission.pool.drop_state(taken.state_slot)
            return
        mark = taken.mark
        self._put(taken.request, mark.digest, mark.position, taken.state_slot)

    def take_end(self, request: Request) -> None:
        """The running state of a request that is answered becomes a snapshot for the next turn, however short."""
        held = request.held
        assert held is not None, "a request finishes while it runs"
        if request.done > request.last_mark and request.prompt.policy.reuse != "none":
            num_generated = max(0, request.done - len(request.prompt.ids))
            digest = request.prompt.digest_after(request.generated[:num_generated])
            state_slot, held.state_slot = held.state_slot, 0
            self._put(request, digest, request.done, state_slot)

    def _put(self, request: Request, digest: bytes, length: int, state_slot: int) -> None:
        self.admission.store.put(self.admission.snapshot(request, digest, length, state_slot))
