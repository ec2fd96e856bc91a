"""What processes say to each other: small, frozen, typed. How it becomes JSON, and back, is ``codec.py``.

Worker to front: ``Hello`` when it is ready, ``Beat`` several times a second, ``Piece`` of an answer it was asked for.
Front to worker: ``Roster`` (who else there is), ``Holdings`` (who holds what), ``Ask``, ``Abort``, ``Stop``.
Worker to worker, over connections of their own: ``Greet`` and ``Greeted``, then ``Wants``, ``Go`` and ``Cancel`` one
way and ``Ready``, ``Parcel`` (of one ``Entry`` or several, with their bytes behind it) or ``Refused`` the other. Every
message that starts or ends work carries the generation of the process it is meant for or comes from; a nonce names one
request for one entry, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hello:
    """A worker is ready: where peers reach it, what encoding costs it, and on what ``kind`` of device."""

    rank: int
    generation: int
    pid: int
    host: str
    port: int
    device: str
    fingerprint: str
    cost: dict[str, float]
    kind: str = ""


@dataclass(frozen=True)
class Failed:
    """A worker cannot start; ``reason`` is one sentence."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True)
class Beat:
    """Still alive; what came to its store and went since the beat before, as hexadecimal keys.

    ``busy_s`` is for how long its engine has been at what it does now, 0 if it waits; ``scale`` is what its work costs
    by its own clock, beside what it said in its ``Hello``, and ``spread`` how sure that is.
    """

    rank: int
    generation: int
    number: int
    queued_s: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    busy_s: float = 0.0
    scale: float = 1.0
    spread: float = 0.0


@dataclass(frozen=True)
class Roster:
    """All workers that are ready, as the fields of their ``Hello``."""

    members: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Holdings:
    """A peer's beat, passed on."""

    rank: int
    generation: int
    queued_s: float
    added: tuple[str, ...]
    removed: tuple[str, ...]
    busy_s: float = 0.0
    scale: float = 1.0
    spread: float = 0.0


@dataclass(frozen=True)
class Ask:
    """A whole request, for the worker to combine."""

    id: str
    task: dict[str, Any]


@dataclass(frozen=True)
class Abort:
    """Nobody waits for request ``id`` any more."""

    id: str


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, or the error that ended it."""

    id: str
    result: dict[str, Any]
    is_last: bool


@dataclass(frozen=True)
class Forget:
    """Drop what matches, and these texts (token ids as bytes, in hexadecimal), before anything that is asked later;
    ``Forgot`` answers."""

    number: int
    source: str | None
    name: str | None
    namespace: str | None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Forgot:
    """So much was dropped, and these texts were meant."""

    number: int
    counts: dict[str, int]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """End the process."""


@dataclass(frozen=True)
class Greet:
    """First word on a connection between peers: who speaks, to whom, and how entries are to be carried."""

    rank: int
    generation: int
    to_rank: int
    to_generation: int
    transport: str
    device: str
    meeting: str = ""


@dataclass(frozen=True)
class Greeted:
    """The answer: accepted, or why not; ``transport`` is the one that will be used."""

    generation: int
    transport: str
    reason: str = ""


@dataclass(frozen=True)
class Want:
    """Send the entry of a segment: from the store, or encoded now; nobody uses it from ``expires_s`` on.

    ``is_trial``: it is only looked at, and not kept once it was sent. ``deterministic``: it is for a request that is,
    and so encoded in a step of its own. ``waits``: there is no room for it yet, so ``Ready`` is said when it is made,
    and it is sent after ``Go``. ``primer`` is the digest of the text that it is encoded behind, empty for none.
    """

    nonce: int
    generation: int
    key: str
    ids: tuple[int, ...]
    seam: int
    namespace: str | None = None
    name: str | None = None
    source: str | None = None
    expires_s: float | None = None
    is_trial: bool = False
    deterministic: bool = False
    waits: bool = False
    primer: str = ""


@dataclass(frozen=True)
class Wants:
    """Several at once, so that they are encoded together."""

    items: tuple[Want, ...]


@dataclass(frozen=True)
class Ready:
    """The entry of a ``Want`` is there: it waits for room, or comes with others, of which this is known sooner."""

    nonce: int
    generation: int


@dataclass(frozen=True)
class Go:
    """There is room for these: they may be sent."""

    nonces: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    """The entry of a ``Want`` is not needed any more."""

    nonce: int


@dataclass(frozen=True)
class Entry:
    """An entry of a ``Parcel``: what it answers, and how many tokens' K and V it has.

    ``expires_s`` is when whoever sends it stops using it, as ``time.time()`` tells it.
    """

    nonce: int
    generation: int
    key: str
    num_tokens: int
    encode_s: float
    was_held: bool
    expires_s: float | None = None


@dataclass(frozen=True)
class Parcel:
    """Entries that travel together; their bytes follow on the transport, as ``engine/parcel.py`` lays them out.
    ``num_kept`` says of which transitions are left; ``pack_s`` is what packing took of the sender's processor."""

    entries: tuple[Entry, ...]
    num_kept: tuple[int, ...]
    num_bytes: int
    digest: int
    pack_s: float = 0.0


@dataclass(frozen=True)
class Refused:
    """There will be no entry for this nonce."""

    nonce: int
    generation: int
    reason: str


@dataclass(frozen=True)
class Handle:
    """Where an entry's bytes lie in the memory of a GPU that both workers use: CUDA's handles, in hexadecimal."""

    memory: str
    size: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    needs_event: bool
    start: int


_KINDS = (
    *(Hello, Failed, Beat, Roster, Holdings, Ask, Abort, Piece, Forget, Forgot, Stop),
    *(Greet, Greeted, Want, Wants, Ready, Go, Cancel, Entry, Parcel, Refused, Handle),
)
Message = (
    Hello | Failed | Beat | Roster | Holdings | Ask | Abort | Piece | Stop | Greet | Greeted | Want | Cancel | Entry
) | (Refused | Handle | Forget | Forgot | Wants | Ready | Go | Parcel)
BY_NAME: Mapping[str, type[Any]] = {kind.__name__: kind for kind in _KINDS}
