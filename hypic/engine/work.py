"""One step, as the scheduler puts it together: which requests and encodes run, and how far each gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypic.engine.chain import Chain
from hypic.engine.encode import Encode
from hypic.engine.plan import Mark
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment


@dataclass(frozen=True)
class EncodeRun:
    """A segment's share of a step; ``reached`` tokens of it are done afterwards."""

    job: Encode
    chain: Chain
    reached: int

    @property
    def is_last(self) -> bool:
        """Whether the segment is done afterwards."""
        return self.reached == len(self.job.entry.ids)

    def advance(self) -> None:
        """Move its cursor; what was run counts for the first who waits."""
        next(iter(self.job.waiters.values())).encoded += self.chain.num_tokens
        self.job.done = self.reached


@dataclass(frozen=True)
class RequestRun:
    """A request's share of a step; position ``reached`` is done afterwards."""

    request: Request
    chain: Chain
    reached: int

    def advance(self) -> None:
        """Move the request's cursors."""
        request = self.request
        request.computed += 0 if request.is_decoding else self.chain.num_tokens
        request.done, request.initial_slot = self.reached, self.chain.final_slot
        if request.held is not None:
            request.held.turn_to(self.chain.final_slot)


@dataclass(frozen=True)
class SnapshotTaken:
    """A snapshot that becomes valid once the step has run."""

    request: Request
    mark: Mark
    state_slot: int


@dataclass
class Work:
    """One step. Encodes are packed first: what they write, later chains of the same step read. ``is_advanced``: its
    requests' cursors stand behind it."""

    encodes: list[EncodeRun] = field(default_factory=list)
    requests: list[RequestRun] = field(default_factory=list)
    snapshots: list[SnapshotTaken] = field(default_factory=list)
    is_advanced: bool = False

    @property
    def chains(self) -> list[Chain]:
        return [run.chain for run in self.encodes] + [run.chain for run in self.requests]

    @property
    def finished(self) -> list[CachedSegment]:
        """Segments that are done with it."""
        return [run.job.entry for run in self.encodes if run.is_last]

    @property
    def all_requests(self) -> dict[str, Request]:
        """All that have something in it, by their ids: who waits for what is encoded, and who runs."""
        waiting = {request.id: request for run in self.encodes for request in run.job.waiters.values()}
        return waiting | {run.request.id: run.request for run in self.requests}

    def has(self, request: Request) -> bool:
        return any(run.request is request for run in self.requests)
