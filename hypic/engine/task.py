"""What is handed to an engine and comes out of it: requests, pieces of answers, what it knows of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypic.engine.plan import Piece
from hypic.errors import HypicError
from hypic.types import Completion, Policy, SamplingParams


@dataclass(frozen=True)
class Vocabulary:
    """What the engine needs of a tokenizer: ids to text, and the ids that end an answer."""

    decode: Callable[[Sequence[int]], str]
    eos_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    defaults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A request as it is handed to the engine; ``warm`` asks for its segments to be encoded and nothing else.

    ``stays``: no other worker is asked for any part of it. ``generated`` is what another worker has answered already:
    the answer goes on behind it. ``is_head`` asks for nothing but a snapshot behind its last token, when
    there is nothing else to do. ``is_trial``: entries made for it never leave the device.
    """

    id: str
    pieces: Sequence[Piece]
    sampling: SamplingParams = SamplingParams()
    policy: Policy = Policy()
    tokenize_s: float = 0.0
    warm: bool = False
    stays: bool = False
    is_head: bool = False
    is_trial: bool = False
    notes: tuple[str, ...] = ()
    generated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Emission:
    """Something for the owner of request ``id``; after ``is_last`` there is nothing more."""

    id: str
    result: Completion | HypicError
    is_last: bool
