"""What processes say to each other: small, frozen, typed, as JSON. Nothing that is received is executed or trusted.

Worker to front: ``Hello`` when it is ready, ``Beat`` several times a second, ``Piece`` of an answer it was asked for.
Front to worker: ``Roster`` (who else there is), ``Holdings`` (who holds what), ``Ask``, ``Abort``, ``Stop``.
Worker to worker, over connections of their own: ``Greet`` and ``Greeted``, then ``Wants`` and ``Cancel`` one way and
``Entry`` (with its bytes behind it) or ``Refused`` the other. Every message that starts or ends work carries the
generation of the process it is meant for or comes from; a nonce names one request for one entry, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypic.errors import WorkerLost

LONGEST_BYTES = 2**26


@dataclass(frozen=True)
class Hello:
    """A worker is ready: where peers reach it, and what encoding costs it."""

    rank: int
    generation: int
    pid: int
    host: str
    port: int
    device: str
    fingerprint: str
    cost: dict[str, float]


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
    by its own clock, beside what it said in its ``Hello``.
    """

    rank: int
    generation: int
    number: int
    queued_s: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    busy_s: float = 0.0
    scale: float = 1.0


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

    ``is_trial``: it is only looked at, and not kept once it was sent.
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


@dataclass(frozen=True)
class Wants:
    """Several at once, so that they are encoded together."""

    items: tuple[Want, ...]


@dataclass(frozen=True)
class Cancel:
    """The entry of a ``Want`` is not needed any more."""

    nonce: int


@dataclass(frozen=True)
class Entry:
    """An entry; its bytes follow on the transport. ``tensors`` are ``(name, type, shape)`` in their order.

    ``expires_s`` is when whoever sends it stops using it, as ``time.time()`` tells it.
    """

    nonce: int
    generation: int
    key: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    num_bytes: int
    digest: int
    encode_s: float
    was_held: bool
    expires_s: float | None = None


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
    *(Greet, Greeted, Want, Wants, Cancel, Entry, Refused, Handle),
)
Message = (
    Hello | Failed | Beat | Roster | Holdings | Ask | Abort | Piece | Stop | Greet | Greeted | Want | Cancel | Entry
) | (Refused | Handle | Forget | Forgot | Wants)
_BY_NAME: Mapping[str, type[Any]] = {kind.__name__: kind for kind in _KINDS}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)], separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The message in a frame, every field of the type that it is declared with.

    Raises:
        WorkerLost: it is none that ``encode`` writes; whoever sent it is not to be spoken with any more.
    """
    try:
        name, given = json.loads(data)
        message: Message = _made(_BY_NAME[name], given)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WorkerLost(f"a worker sent what is no message ({error!r:.120}); it is given up.") from error
    return message


def _made(kind: type[Any], given: Any) -> Any:
    """A message, or a part of one, from its fields.

    Raises:
        TypeError, ValueError: they are not its.
    """
    if not isinstance(given, dict):
        raise TypeError(f"{given!r:.40} are no fields of {kind.__name__}")
    hints = _hints(kind.__name__)
    if not given.keys() <= hints.keys():
        raise ValueError(f"unknown fields {sorted(given.keys() - hints.keys())!r:.80}")
    return kind(**{key: _as(hints[key], value) for key, value in given.items()})


@cache
def _hints(name: str) -> dict[str, Any]:
    return get_type_hints(_BY_NAME[name])


def _as(hint: Any, value: Any) -> Any:
    """``value`` if it is of the annotated type; lists become tuples.

    Raises:
        TypeError: it is not.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind is tuple and isinstance(value, list):
        return _tuple(arguments, value)
    if kind is dict and isinstance(value, dict):
        return {_as(arguments[0], key): _as(arguments[1], item) for key, item in value.items()}
    if kind in (Union, UnionType):
        return value if value is None else _as(next(a for a in arguments if a is not type(None)), value)
    if hint is float and type(value) is int:
        return float(value)
    if kind is None and hint is Want:
        return _made(Want, value)
    if kind is None and type(value) is hint:
        return value
    raise TypeError(f"{value!r:.40} is not {hint}")


def _tuple(arguments: tuple[Any, ...], value: list[Any]) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in (int, str) and set(map(type, value)) <= {arguments[0]}:
            return tuple(value)  # token ids come by the thousand
        return tuple(_as(arguments[0], item) for item in value)
    if len(arguments) != len(value):
        raise TypeError(f"{len(value)} values for {len(arguments)}")
    return tuple(_as(hint, item) for hint, item in zip(arguments, value, strict=True))
