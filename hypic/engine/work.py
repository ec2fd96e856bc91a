"""One step, as the scheduler puts it together: which requests and encodes run, and how far each gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypic.engine.chain import Chain
from hypic.engine.plan import Mark
from hypic.engine.request import Encode, Request


@dataclass(frozen=True)
class EncodeRun:
    """A segment's share of a step; ``reached`` tokens of it are done afterwards."""

    job: Encode
    chain: Chain
    reached: int


@dataclass(frozen=True)
class RequestRun:
    """A request's share of a step; position ``reached`` is done afterwards."""

    request: Request
    chain: Chain
    reached: int


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

    def has(self, request: Request) -> bool:
        return any(run.request is request for run in self.requests)
