"""What exactly is kept of a segment, as handles into the pool; never tensors of its own.

A *segment entry* holds, for the interior of a segment encoded alone: per linear layer its transition ``T``, its
zero-start end state ``B`` and its convolution tail (one transition slot and one state slot hold all layers), and per
full-attention layer unrotated K and V (pages). A *snapshot* holds a prompt's head exactly: running state (``B = S``, no
``T``) and the page list, which it shares with the segments it contains.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypic.engine.token_ids import TokenIds, packed_ids
from hypic.types import Segment

Slots = NDArray[np.int64]
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Primer:
    """A text behind which segments are encoded, as token ids: it stands in no prompt. ``longest`` are the most tokens
    of a segment that still has room behind it. ``num_passages`` are the passages it holds: it stands for a prompt in
    which as many segments come before."""

    ids: tuple[int, ...]
    longest: int
    num_passages: int = 1

    @cached_property
    def digest(self) -> str:
        """Its name in keys; empty for one of no token, which is none."""
        return hashlib.sha256(packed_ids(self.ids)).hexdigest()[:32] if self.ids else ""


@dataclass(frozen=True)
class Identity:
    """Everything besides tokens that changes what an entry holds; ``fingerprint`` covers weights and configuration.

    ``primers`` are what segments are encoded behind unless a policy says otherwise, none, one, or the rungs of one by
    place; entries are shared by engines with others or none, each under a key of its own. ``seam_opening`` is how far
    seams follow openings unless a policy says otherwise.

    ``path`` is how it is computed: by kernels or without, on which kind of device. Paths agree within rounding and
    share their entries, but for deterministic requests, whose bits may not depend on who filled the store.
    """

    fingerprint: str
    dtype: str
    storage: str = "lossless"
    adapter: str = ""
    path: str = field(default="", compare=False)
    primers: tuple[Primer, ...] = field(default=(), compare=False)
    seam_opening: int = field(default=0, compare=False)

    def key(
        self, ids: tuple[int, ...], seam: int, namespace: str | None, deterministic: bool, primer: str = ""
    ) -> bytes:
        """SHA-256 over canonical bytes; position, names and claims of clients never enter. ``primer`` is the digest of
        the one that the text is encoded behind; empty: none."""
        return key_of(self.begun(seam, namespace, deterministic, primer), ids)

    def begun(self, seam: int, namespace: str | None, deterministic: bool, primer: str = "") -> Any:
        """The digest of a key before token ids."""
        path = f"{deterministic}:{self.path}" if deterministic else str(deterministic)
        parts = (self.fingerprint, self.dtype, self.storage, self.adapter, str(seam), path)
        behind = (f"behind:{primer}",) if primer else ()
        return _begun((*parts, "none" if namespace is None else f"some:{namespace}", *behind))

    def primer_of(self, num_tokens: int, place: float | None = None) -> Primer | None:
        """What a segment of so many tokens is encoded behind that has ``place`` segments before it: of all primers with
        room for it the one whose number of passages is nearest, of two as near the longer; none where none has room,
        or where that one holds no token, as the bare rung of a model without a chat template.
        ``None`` is any place: the middle one, by half of all passages."""
        near = place if place is not None else max([one.num_passages for one in self.primers], default=0) / 2
        with_room = [primer for primer in self.primers if num_tokens <= primer.longest]
        found = min(with_room, key=lambda one: (abs(one.num_passages - near), -one.num_passages), default=None)
        return found if found is not None and found.ids else None

    def places_of(self, num_tokens: int) -> tuple[int, ...]:
        """Of ``places``, one for each rung that a segment of so many tokens may be encoded behind."""
        found: dict[Primer | None, int] = {}
        for place in self.places:
            found.setdefault(self.primer_of(num_tokens, place), place)
        return tuple(found.values())

    @property
    def places(self) -> tuple[int, ...]:
        """A number of segments before one for each rung that it may be encoded behind."""
        return tuple(primer.num_passages for primer in self.primers) or (0,)


def key_of(begun: Any, ids: tuple[int, ...]) -> bytes:
    """The key of ids, given the digest before them, as ``Identity.begun`` gives it."""
    if not isinstance(ids, TokenIds):
        return _key(begun, packed_ids(ids))
    packed = ids.packed
    known = packed.key  # read once: other threads make keys of the same text, perhaps for another namespace
    if known is None or known[0] is not begun:
        packed.key = known = begun, _key(begun, packed.data)
    return known[1]


def _key(begun: Any, packed: bytes) -> bytes:
    digest = begun.copy()
    digest.update(packed)
    return bytes(digest.digest())


@lru_cache(maxsize=256)
def _begun(parts: tuple[str, ...]) -> Any:
    """The digest before token ids."""
    digest = hashlib.sha256()
    for part in (str(FORMAT_VERSION), *parts):
        digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest


@dataclass(frozen=True)
class Label:
    """What a text is called by whoever passed it; never part of an identity, but what it is forgotten by."""

    name: str | None = None
    source: str | None = None
    namespace: str | None = None

    def fits(self, name: str | None, source: str | None, namespace: str | None) -> bool:
        """Whether all that is given is this label's."""
        wanted = ((name, self.name), (source, self.source), (namespace, self.namespace))
        return all(given is None or given == own for given, own in wanted)


def label_of(segment: Segment) -> Label:
    """A segment's label."""
    return Label(segment.name, segment.source, segment.namespace)


@dataclass(eq=False)
class CachedSegment:
    """One entry: ``kv_slots [n]`` are the pool's token slots of the cached tokens, in order.

    ``ids`` are the tokens the key was made of (a segment's with its seam, a snapshot's whole head), compared again on
    every hit. ``transition_slot`` is ``None`` for a snapshot. ``num_own`` are the tokens of a snapshot that stand in no
    segment. ``pins`` counts requests that use it right now, ``uses`` all that ever did. ``labels`` are all under which
    its text was passed, a snapshot's those of all texts in it. ``expires_s`` is the time (as ``time.time()`` tells it)
    from which it is no longer used; one that is forgotten goes with its last user. One ``is_trial`` was made to be
    looked at: it is never written below the device, listed, or remembered. ``primer`` is the digest of the text that it
    was encoded behind, empty for none.
    """

    key: bytes
    ids: tuple[int, ...]
    kv_slots: Slots
    pages: tuple[int, ...]
    state_slot: int
    transition_slot: int | None
    num_bytes: int
    name: str | None = None
    source: str | None = None
    namespace: str | None = None
    deterministic: bool = False
    num_own: int | None = None
    pins: int = field(default=0)
    uses: int = field(default=0)
    labels: set[Label] = field(default_factory=set)
    expires_s: float | None = None
    is_forgotten: bool = False
    num_hits: int = 0
    is_trial: bool = False
    primer: str = ""

    @cached_property
    def page_numbers(self) -> Slots:
        """``pages`` as an array, which the pool counts with."""
        return np.asarray(self.pages, dtype=np.int64)

    @property
    def is_snapshot(self) -> bool:
        return self.transition_slot is None

    @property
    def num_cached(self) -> int:
        """Tokens whose effect is kept: the interior's, or a snapshot's whole head."""
        return len(self.kv_slots)

    @property
    def num_saved(self) -> int:
        """Tokens that a hit does not compute: a segment is encoded with its seam."""
        return max(1, len(self.ids) if self.num_own is None else self.num_own)
