"""Messages as JSON, and back: each field is read as the type that it is declared with. Nothing received is executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypic.engine.parallel.messages import BY_NAME, Entry, Message, Want
from hypic.errors import WorkerLost

LONGEST_BYTES = 2**26
Reader = Callable[[Any], Any]


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, message], separators=(",", ":"), default=vars).encode()


def decode(data: bytes) -> Message:
    """The message in a frame, every field of the type that it is declared with.

    Raises:
        WorkerLost: it is none that ``encode`` writes; whoever sent it is not to be spoken with any more.
    """
    try:
        name, given = json.loads(data)
        message: Message = _made(BY_NAME[name], given)
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
    readers = _readers(kind.__name__)
    if not given.keys() <= readers.keys():
        raise ValueError(f"unknown fields {sorted(given.keys() - readers.keys())!r:.80}")
    return kind(**{key: readers[key](value) for key, value in given.items()})


@cache
def _readers(name: str) -> dict[str, Reader]:
    return {key: _reader(hint) for key, hint in get_type_hints(BY_NAME[name]).items()}


def _reader(hint: Any) -> Reader:
    """What takes a value of an annotated type out of JSON; lists become tuples. It raises ``TypeError`` for another."""
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if kind is tuple and arguments[1:] == (Ellipsis,):
        return _many(arguments[0])
    if kind is tuple:
        return _several([_reader(argument) for argument in arguments])
    if kind is dict:
        return _mapping(*map(_reader, arguments))
    if kind in (Union, UnionType):
        some = _reader(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else some(value)
    return partial(_made, hint) if hint in (Want, Entry) else partial(_plain, hint)


def _plain(hint: type[Any], value: Any) -> Any:
    if type(value) is hint:
        return value
    if hint is float and type(value) is int:
        return float(value)
    raise TypeError(f"{value!r:.40} is not {hint}")


def _many(hint: Any) -> Reader:
    one = _reader(hint)

    def read(value: Any) -> tuple[Any, ...]:
        _plain(list, value)
        if hint in (int, str) and set(map(type, value)) <= {hint}:  # token ids come by the thousand
            return tuple(value)
        return tuple(map(one, value))

    return read


def _several(readers: Sequence[Reader]) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if len(_plain(list, value)) != len(readers):
            raise TypeError(f"{len(value)} values for {len(readers)}")
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _mapping(key_of: Reader, item_of: Reader) -> Reader:
    return lambda value: {key_of(key): item_of(item) for key, item in _plain(dict, value).items()}
