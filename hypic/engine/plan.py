"""From pieces of a prompt to a plan: which runs of tokens are live, which are cached, at which positions. Pure.

All reuse policy lives here, and nothing of what is cached: the plan is a function of prompt and policy, so that the
answer is one too. What the caches hold only decides which spans must still be computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hypic.engine import opening, prefix_hash
from hypic.engine.segment import Identity, Label, Primer, key_of, label_of
from hypic.engine.token_ids import Ids, head_of
from hypic.errors import PromptError
from hypic.types import Policy, Segment


@dataclass(frozen=True)
class Piece:
    """A run of prompt tokens: a segment's, or live text's when ``segment`` is ``None``.

    ``ends_message`` marks a point at which the prompt may later be continued: the end of the
    leading live text and the end of each message's content. A snapshot may be taken there.
    ``namespaces`` are those of live text; a segment has its own. ``is_answer``: it ends with an answer's own ids.
    ``place`` is how many segments count as standing before this one, if not those that do. ``ends`` tell after how many
    of its first tokens a line or a sentence of a segment ends (``opening.ends_of``).
    """

    ids: tuple[int, ...]
    segment: Segment | None = None
    ends_message: bool = False
    namespaces: frozenset[str] = frozenset()
    is_answer: bool = False
    place: int | None = None
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """Prompt positions ``start..stop-1`` that are run."""

    start: int
    stop: int


@dataclass(frozen=True)
class Interior:
    """Prompt positions that are cached, of the planned segment ``number``, which begins at ``origin``.

    ``key`` names the entry: what tokens from ``start`` on do, when a text that ends at ``stop`` is encoded alone from
    ``origin`` on. So an interior that ends before its segment is simply the interior of a shorter text. Alone means:
    behind ``primer`` where there is one, which stands in no prompt.
    """

    start: int
    stop: int
    origin: int
    number: int
    key: bytes
    primer: Primer | None = None

    @property
    def behind(self) -> str:
        """The primer's digest, empty for none."""
        return "" if self.primer is None else self.primer.digest

    @property
    def first(self) -> int:
        """The prompt position of the first token that was in view when it was encoded: maybe one before the prompt."""
        return self.origin - (0 if self.primer is None else len(self.primer.ids))

    @property
    def seam(self) -> int:
        """Tokens of the encoded text that stand before the interior."""
        return self.start - self.origin


@dataclass(frozen=True)
class PlannedSegment:
    """A segment of the prompt; ``keys`` are those of its interiors: none when it is run live, for ``reason``. ``seam``
    is the width of its head seam."""

    segment: Segment
    ids: tuple[int, ...]
    origin: int
    keys: tuple[bytes, ...]
    seam: int
    reason: str = ""

    @property
    def key(self) -> bytes | None:
        """Of its first interior."""
        return self.keys[0] if self.keys else None


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

    @cached_property
    def interiors(self) -> tuple[Interior, ...]:
        """In prompt order."""
        return tuple([span for span in self.spans if isinstance(span, Interior)])

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """In prompt order."""
        return tuple([span for span in self.spans if isinstance(span, Row)])

    @property
    def is_interleaved(self) -> bool:
        """Whether there is a row between any two interiors."""
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return not any(isinstance(one, Interior) and isinstance(other, Interior) for one, other in pairs)

    def ids_of(self, span: Interior) -> tuple[int, ...]:
        """The text that an interior's entry is encoded from."""
        return head_of(self.segments[span.number].ids, span.stop - span.origin)

    def digest_after(self, generated: Sequence[int]) -> bytes:
        """The name of the prompt followed by generated tokens."""
        digest = self._hash.copy()
        digest.update(prefix_hash.live(generated))
        return prefix_hash.named(digest, {label.namespace for label in self.labels(len(self.ids))})

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


def _live_reason(num_tokens: int, seam: int, policy: Policy, later: Later) -> str:
    """Why a segment of so many tokens is run live, or nothing if it is cached."""
    if policy.reuse != "segments":
        return "cache off" if policy.reuse == "none" else "prefix reuse only"
    if not policy.interiors(num_tokens, seam):
        least = max(policy.shortest, seam + policy.tail_seam + 1)
        return f"too short: {num_tokens} tokens, cached from {least}"
    if later.num_segments < policy.live_last:
        return f"among the last {policy.live_last}"
    return "" if later.num_pieces or policy.tail_seam else "no text after it"


@dataclass(frozen=True)
class Later:
    """How many segments and pieces stand behind one."""

    num_segments: int
    num_pieces: int


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
    begun: dict[tuple[int, str | None, str], Any] = field(default_factory=dict)

    def live(self, piece: Piece, digest: Any) -> None:
        if piece.namespaces:
            self.live_spaces.append((self.num_tokens, piece.namespaces))
            self.spaces |= piece.namespaces
        done = 0
        if piece.is_answer and len(piece.ids) > 1:
            done = len(piece.ids) - 1
            digest.update(prefix_hash.live(piece.ids[:done]))
            self.marks.append(Mark(self.num_tokens + done, prefix_hash.named(digest, self.spaces), is_taken=False))
        digest.update(prefix_hash.live(piece.ids[done:]))
        self.row(len(piece.ids))

    def row(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        start = self.num_tokens
        self.num_tokens += num_tokens
        if self.spans and isinstance(self.spans[-1], Row):
            start = self.spans.pop().start
        self.spans.append(Row(start, self.num_tokens))

    def segment(self, piece: Piece, digest: Any, later: Later) -> None:
        assert piece.segment is not None, "only pieces with a segment come here"
        num_tokens, seam, origin = len(piece.ids), self._seam(piece), self.num_tokens
        reason = _live_reason(num_tokens, seam, self.policy, later)
        self.spaces.add(piece.segment.namespace)
        if reason:
            self.segments.append(PlannedSegment(piece.segment, piece.ids, origin, (), seam, reason))
            digest.update(prefix_hash.live(piece.ids))
            self.row(len(piece.ids))
            return
        self.policy.check_encoding(num_tokens, seam)
        done, keys = 0, list[bytes]()
        primer = self._primer(piece) if self.policy.primed else None
        for start, stop in self.policy.interiors(num_tokens, seam):
            keys.append(self._key(piece, start, stop, primer))
            digest.update((prefix_hash.later(done) if done else b"") + prefix_hash.entry(keys[-1]))
            self.row(start - done)
            self.num_tokens += stop - start
            places = origin + start, origin + stop, origin
            self.spans.append(Interior(*places, len(self.segments), keys[-1], primer))
            done = stop
        if done < len(piece.ids):
            digest.update(prefix_hash.live(piece.ids[done:]))
            self.row(len(piece.ids) - done)
        self.segments.append(PlannedSegment(piece.segment, piece.ids, origin, tuple(keys), seam))

    def _seam(self, piece: Piece) -> int:
        assert piece.segment is not None, "only segments have seams"
        given = self.policy.seam_opening
        most = self.identity.seam_opening if given is None else given
        return self.policy.head_seam(len(piece.ids), piece.segment.seam, opening.width(piece.ends, most))

    def _primer(self, piece: Piece) -> Primer | None:
        place = len(self.segments) if piece.place is None else piece.place
        return self.identity.primer_of(len(piece.ids), place if self.policy.rungs else None)

    def _key(self, piece: Piece, start: int, stop: int, primer: Primer | None) -> bytes:
        assert piece.segment is not None, "only segments have entries"
        space, behind = piece.segment.namespace, "" if primer is None else primer.digest
        named = start, space, behind
        if named not in self.begun:
            self.begun[named] = self.identity.begun(start, space, self.policy.deterministic, behind)
        return key_of(self.begun[named], head_of(piece.ids, stop))


def placed(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, each segment with its place written on it, so that it keeps it in another prompt."""
    places = itertools.count()
    return [piece if piece.segment is None else replace(piece, place=next(places)) for piece in pieces]


def make(pieces: Sequence[Piece], policy: Policy, identity: Identity) -> Plan:
    """Plan a prompt.

    Raises:
        PromptError: there is no token at all.
        ConfigError: encoding a segment would cost too much (``Policy.check_encoding``).
    """
    pieces = [piece for piece in pieces if piece.ids]
    if not pieces:
        raise PromptError("the prompt has no token; give it some text.")
    builder, digest = _Builder(policy, identity), prefix_hash.start(policy, identity)
    num_segments = sum(piece.segment is not None for piece in pieces)
    for number, piece in enumerate(pieces):
        num_later = len(pieces) - 1 - number
        if piece.segment is None:
            builder.live(piece, digest)
        else:
            builder.segment(piece, digest, Later(num_segments - len(builder.segments) - 1, num_later))
        ends = piece.ends_message or (policy.reuse == "prefix" and piece.segment is not None)
        if ends and num_later and isinstance(builder.spans[-1], Row):
            builder.marks.append(Mark(builder.num_tokens, prefix_hash.named(digest, builder.spaces)))
    marks = () if policy.reuse == "none" else tuple(builder.marks)
    spaces = tuple(builder.live_spaces)
    return Plan(
        Ids(piece.ids for piece in pieces), tuple(builder.spans), tuple(builder.segments), marks, policy, spaces, digest
    )
