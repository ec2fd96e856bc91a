"""From pieces of a prompt to a plan: which runs of tokens are live, which are cached, at which positions. Pure.

All reuse policy lives here, and nothing of what is cached: the plan is a function of prompt and policy, so that the
answer is one too. What the caches hold only decides which spans must still be computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypic.engine.segment import Identity
from hypic.errors import PromptError
from hypic.types import Policy, Segment


@dataclass(frozen=True)
class Piece:
    """A run of prompt tokens: a segment's, or live text's when ``segment`` is ``None``.

    ``ends_message`` marks a point at which the prompt may later be continued: the end of the
    leading live text and the end of each message's content. A snapshot may be taken there.
    """

    ids: tuple[int, ...]
    segment: Segment | None = None
    ends_message: bool = False


@dataclass(frozen=True)
class Row:
    """Prompt positions ``start..stop-1`` that are run."""

    start: int
    stop: int


@dataclass(frozen=True)
class Interior:
    """Prompt positions that are cached: the interior of the planned segment ``number``, which begins at ``origin``."""

    start: int
    stop: int
    origin: int
    number: int


@dataclass(frozen=True)
class PlannedSegment:
    """A segment of the prompt; ``key`` is ``None`` when it is run live, for ``reason``."""

    segment: Segment
    ids: tuple[int, ...]
    origin: int
    key: bytes | None
    reason: str = ""


@dataclass(frozen=True)
class Mark:
    """A position at which a snapshot may stand, named by the running hash of all before it."""

    position: int
    digest: bytes


@dataclass(frozen=True)
class Plan:
    """The chain of a prompt. ``spans`` cover all positions in order; the last one is a row."""

    ids: tuple[int, ...]
    spans: tuple[Row | Interior, ...]
    segments: tuple[PlannedSegment, ...]
    marks: tuple[Mark, ...]
    policy: Policy
    _hash: Any = field(repr=False)

    def digest_after(self, generated: Sequence[int]) -> bytes:
        """The running hash of the prompt followed by generated tokens."""
        digest = self._hash.copy()
        digest.update(_live(generated))
        return bytes(digest.digest())

    def continued(self, generated: Sequence[int]) -> Plan:
        """The plan of the prompt followed by generated tokens, for a request that starts again."""
        if not generated:
            return self
        last = self.spans[-1]
        spans = (*self.spans[:-1], Row(last.start, last.stop + len(generated)))
        return Plan(self.ids + tuple(generated), spans, self.segments, self.marks, self.policy, self._hash)


def _live(ids: Sequence[int]) -> bytes:
    """Live tokens in the running hash; borders between runs leave no trace."""
    return np.asarray(ids, dtype="<i4").tobytes()


def _entry(key: bytes) -> bytes:
    """A cached segment in the running hash; no token id is -1."""
    return b"\xff\xff\xff\xff" + key


def _start(policy: Policy, identity: Identity) -> Any:
    """The running hash before the first token: everything besides tokens that changes a running state."""
    digest = hashlib.sha256(identity.key((), policy.seam if policy.compose != "transition" else 0, None, False))
    digest.update(f"{policy.compose}|{policy.rotate}|{policy.deterministic}".encode())
    return digest


def _live_reason(piece: Piece, policy: Policy, is_last: bool) -> str:
    """Why a segment is run live, or nothing if it is cached."""
    if policy.reuse != "segments":
        return "cache off" if policy.reuse == "none" else "prefix reuse only"
    if len(piece.ids) <= policy.seam or len(piece.ids) < policy.shortest:
        return f"too short: {len(piece.ids)} tokens, cached from {max(policy.shortest, policy.seam + 1)}"
    return "no text after it" if is_last else ""


@dataclass
class _Builder:
    policy: Policy
    identity: Identity
    ids: list[int] = field(default_factory=list)
    spans: list[Row | Interior] = field(default_factory=list)
    segments: list[PlannedSegment] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def row(self, ids: Sequence[int]) -> None:
        start = len(self.ids)
        if not ids:
            return
        self.ids += ids
        if self.spans and isinstance(self.spans[-1], Row):
            start = self.spans.pop().start
        self.spans.append(Row(start, len(self.ids)))

    def segment(self, piece: Piece, digest: Any, is_last: bool) -> None:
        assert piece.segment is not None, "only pieces with a segment come here"
        reason, origin, seam = _live_reason(piece, self.policy, is_last), len(self.ids), self.policy.seam
        if reason:
            self.segments.append(PlannedSegment(piece.segment, piece.ids, origin, None, reason))
            digest.update(_live(piece.ids))
            self.row(piece.ids)
            return
        key = self.identity.key(piece.ids, seam, piece.segment.namespace, self.policy.deterministic)
        digest.update(_entry(key))
        self.row(piece.ids[:seam])
        self.ids += piece.ids[seam:]
        self.spans.append(Interior(origin + seam, len(self.ids), origin, len(self.segments)))
        self.segments.append(PlannedSegment(piece.segment, piece.ids, origin, key))


def make(pieces: Sequence[Piece], policy: Policy, identity: Identity) -> Plan:
    """Plan a prompt.

    Raises:
        PromptError: there is no token at all.
    """
    pieces = [piece for piece in pieces if piece.ids]
    if not pieces:
        raise PromptError("the prompt has no token; give it some text.")
    builder, digest = _Builder(policy, identity), _start(policy, identity)
    for number, piece in enumerate(pieces):
        if piece.segment is None:
            digest.update(_live(piece.ids))
            builder.row(piece.ids)
        else:
            builder.segment(piece, digest, is_last=number == len(pieces) - 1)
        ends = piece.ends_message or (policy.reuse == "prefix" and piece.segment is not None)
        if ends and number < len(pieces) - 1 and isinstance(builder.spans[-1], Row):
            builder.marks.append(Mark(len(builder.ids), bytes(digest.digest())))
    marks = () if policy.reuse == "none" else tuple(builder.marks)
    return Plan(tuple(builder.ids), tuple(builder.spans), tuple(builder.segments), marks, policy, digest)
