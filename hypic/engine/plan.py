"""From pieces of a prompt to a plan: which runs of tokens are live, which are cached, at which positions. Pure.

All reuse policy lives here, and nothing of what is cached: the plan is a function of prompt and policy, so that the
answer is one too. What the caches hold only decides which spans must still be computed.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

from hypic.engine.segment import Identity, Label, label_of
from hypic.errors import PromptError
from hypic.types import Policy, Segment


@dataclass(frozen=True)
class Piece:
    """A run of prompt tokens: a segment's, or live text's when ``segment`` is ``None``.

    ``ends_message`` marks a point at which the prompt may later be continued: the end of the
    leading live text and the end of each message's content. A snapshot may be taken there.
    ``namespaces`` are those of live text; a segment has its own. ``is_answer``: it ends with an answer's own ids.
    """

    ids: tuple[int, ...]
    segment: Segment | None = None
    ends_message: bool = False
    namespaces: frozenset[str] = frozenset()
    is_answer: bool = False


class Ids(Sequence[int]):
    """Token ids of runs, one run after the other. A warm request needs a few of them before its first token, so they
    are made one tuple only when all are asked for."""

    def __init__(self, runs: Iterable[tuple[int, ...]]) -> None:
        self.runs = tuple(runs)
        self._stops = tuple(accumulate(map(len, self.runs)))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if not isinstance(at, slice):
            return self.whole[at]
        start, stop, step = at.indices(len(self))
        if step != 1 or "whole" in self.__dict__:
            return self.whole[at]
        if stop - start == len(self):
            return self.whole
        return self._between(start, stop)

    def __iter__(self) -> Iterator[int]:
        return iter(self.whole)

    def __eq__(self, other: object) -> bool:
        return self.whole == (other.whole if isinstance(other, Ids) else other)

    def __hash__(self) -> int:
        return hash(self.whole)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """All of them."""
        ids: list[int] = []
        for run in self.runs:
            ids += run
        return tuple(ids)

    def _between(self, start: int, stop: int) -> tuple[int, ...]:
        ids: list[int] = []
        for number in range(bisect_right(self._stops, start), len(self.runs)):
            before = self._stops[number] - len(self.runs[number])
            if before >= stop:
                break
            ids += self.runs[number][max(0, start - before) : stop - before]
        return tuple(ids)


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
    """A position at which a snapshot may stand, named by the running hash of all before it and by its namespaces.

    Without ``is_taken`` one is only looked for there: an answer that was cut off ends before its last token is run.
    """

    position: int
    digest: bytes
    is_taken: bool = True


@dataclass(frozen=True)
class Plan:
    """The chain of a prompt. ``spans`` cover all positions in order; the last one is a row."""

    ids: Ids
    spans: tuple[Row | Interior, ...]
    segments: tuple[PlannedSegment, ...]
    marks: tuple[Mark, ...]
    policy: Policy
    live_spaces: tuple[tuple[int, frozenset[str]], ...]
    _hash: Any = field(repr=False)

    def digest_after(self, generated: Sequence[int]) -> bytes:
        """The name of the prompt followed by generated tokens."""
        digest = self._hash.copy()
        digest.update(_live(generated))
        return _named(digest, {label.namespace for label in self.labels(len(self.ids))})

    def labels(self, length: int) -> set[Label]:
        """Under which names the texts of the first ``length`` positions were passed, one that is cut off as well."""
        of_segments = {label_of(planned.segment) for planned in self.segments if planned.origin < length}
        live = {space for start, spaces in self.live_spaces if start < length for space in spaces}
        return of_segments | {Label(namespace=space) for space in live}

    def continued(self, generated: Sequence[int]) -> Plan:
        """The plan of the prompt followed by generated tokens, for a request that starts again."""
        if not generated:
            return self
        last = self.spans[-1]
        spans = (*self.spans[:-1], Row(last.start, last.stop + len(generated)))
        return replace(self, ids=Ids((*self.ids.runs, tuple(generated))), spans=spans)


def _live(ids: Sequence[int]) -> bytes:
    """Live tokens in the running hash; borders between runs leave no trace."""
    return struct.pack(f"<{len(ids)}i", *ids)


def _entry(key: bytes) -> bytes:
    """A cached segment in the running hash; no token id is -1."""
    return b"\xff\xff\xff\xff" + key


def _named(digest: Any, spaces: set[str | None]) -> bytes:
    """A running hash together with the namespaces of what it covers, so that none is continued from another one.

    Only which they are enters, not where each begins: borders inside live text leave no trace.
    """
    named = digest.copy()
    for space in sorted(space for space in spaces if space is not None):
        named.update(b"\xfe\xff\xff\xff" + len(space.encode()).to_bytes(8, "little") + space.encode())
    return bytes(named.digest())


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
    num_tokens: int = 0
    spans: list[Row | Interior] = field(default_factory=list)
    segments: list[PlannedSegment] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    live_spaces: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    spaces: set[str | None] = field(default_factory=set)

    def live(self, piece: Piece, digest: Any) -> None:
        if piece.namespaces:
            self.live_spaces.append((self.num_tokens, piece.namespaces))
            self.spaces |= piece.namespaces
        digest.update(_live(piece.ids[:-1]))
        if piece.is_answer and len(piece.ids) > 1:
            position = self.num_tokens + len(piece.ids) - 1
            self.marks.append(Mark(position, _named(digest, self.spaces), is_taken=False))
        digest.update(_live(piece.ids[-1:]))
        self.row(len(piece.ids))

    def row(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        start = self.num_tokens
        self.num_tokens += num_tokens
        if self.spans and isinstance(self.spans[-1], Row):
            start = self.spans.pop().start
        self.spans.append(Row(start, self.num_tokens))

    def segment(self, piece: Piece, digest: Any, is_last: bool) -> None:
        assert piece.segment is not None, "only pieces with a segment come here"
        reason, origin, seam = _live_reason(piece, self.policy, is_last), self.num_tokens, self.policy.seam
        self.spaces.add(piece.segment.namespace)
        if reason:
            self.segments.append(PlannedSegment(piece.segment, piece.ids, origin, None, reason))
            digest.update(_live(piece.ids))
            self.row(len(piece.ids))
            return
        key = self.identity.key(piece.ids, seam, piece.segment.namespace, self.policy.deterministic)
        digest.update(_entry(key))
        self.row(seam)
        self.num_tokens = origin + len(piece.ids)
        self.spans.append(Interior(origin + seam, self.num_tokens, origin, len(self.segments)))
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
            builder.live(piece, digest)
        else:
            builder.segment(piece, digest, is_last=number == len(pieces) - 1)
        ends = piece.ends_message or (policy.reuse == "prefix" and piece.segment is not None)
        if ends and number < len(pieces) - 1 and isinstance(builder.spans[-1], Row):
            builder.marks.append(Mark(builder.num_tokens, _named(digest, builder.spaces)))
    marks = () if policy.reuse == "none" else tuple(builder.marks)
    spaces = tuple(builder.live_spaces)
    return Plan(
        Ids(piece.ids for piece in pieces), tuple(builder.spans), tuple(builder.segments), marks, policy, spaces, digest
    )
