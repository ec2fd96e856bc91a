"""Prompts as the engine takes them: live text and segments of random tokens, in the orders that many tests ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypic.engine.plan import Piece
from hypic.types import Policy, Segment
from tests.checkpoints import random_ids

POLICY = Policy(min_segment_tokens=0)
Pieces = Sequence[Piece]


def live(num_tokens: int, seed: int, ends: bool = False) -> Piece:
    return Piece(tuple(random_ids(num_tokens, seed)), None, ends)


def seg(num_tokens: int, seed: int, **labels: Any) -> Piece:
    return Piece(tuple(random_ids(num_tokens, seed)), Segment(f"text {num_tokens} {seed}", **labels))


def flat(pieces: Pieces) -> list[int]:
    return [i for piece in pieces for i in piece.ids]


def many_segments() -> list[Piece]:
    """Live text, segments around every border (one twice, one below the seam, neighbours without glue), a tail."""
    pieces = [live(7, 100)]
    for i, length in enumerate((20, 9, 1, 10, 64, 8, 11, 20, 65)):
        pieces.append(seg(length, length))
        pieces += [live(2, 200 + i)] if i % 2 else []
    return [*pieces, live(12, 300)]


def few_segments() -> list[Piece]:
    return [live(5, 1), seg(30, 2), seg(41, 3), live(2, 4), seg(19, 5), live(9, 6)]


def only_segment(num_tokens: int = 40) -> list[Piece]:
    return [seg(num_tokens, 1), live(15, 2)]


# Prompts that differ in length, in segments and in where live text ends, for requests beside each other.
PROMPTS = [
    many_segments(),
    few_segments(),
    [live(70, 31)],
    [seg(30, 2), live(3, 32)],
    [live(1, 33), seg(30, 2), seg(30, 2), live(1, 34)],
    [live(20, 35, ends=True), live(40, 36, ends=True), seg(64, 37), live(9, 38)],
]
