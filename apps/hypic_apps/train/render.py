"""From questions and passages to token ids, by the rules the engine follows when it answers.

Scaffolding is encoded with special tokens, every passage by itself, and the live text between and behind passages as
plain text: ``"\\n\\n"`` alone between two passages, ``"\\n\\n"`` and the question as one string. Text is data: a
special token spelled in it stays text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

GLUE = "\n\n"


@dataclass(frozen=True)
class Weights:
    """How much each kind of token counts in the loss."""

    passage: float = 0.15
    question: float = 0.05
    answer: float = 1.0
    text: float = 1.0


# Tokens at the beginning of an item that decide which item it is.
NUM_DECIDING = 2


@dataclass(frozen=True)
class Emphasis:
    """How much the tokens of an answer count: the first two of each of its items, its end, and all others."""

    token: float = 1.0
    start: float = 1.0
    end: float = 1.0


@dataclass(frozen=True)
class Piece:
    """A run of text, or, if ``special``, one special token; ``weight`` is its tokens' weight in the loss.

    At the places ``starts``, in characters of the text, items begin: two tokens from there weigh ``start_weight``.
    """

    text: str
    weight: float
    special: bool = False
    is_passage: bool = False
    starts: tuple[int, ...] = ()
    start_weight: float = 0.0


@dataclass(frozen=True)
class Turn:
    """A user message, passages then question, and the assistant's answer, of which items begin at the characters
    ``starts``; ``emphasis`` is how much its tokens count."""

    passages: Sequence[str]
    question: str
    answer: str
    labels: Sequence[str] = ()
    emphasis: Emphasis = Emphasis()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """``ids [T]`` and ``weights [T]``: the weight of predicting this token from those before it; ``spans`` are the
    tokens of every passage, from and to."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    spans: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def conversation(turns: Sequence[Turn], weights: Weights, system: str = "", *, bare: bool = False) -> list[Piece]:
    """The pieces of a chat; ``bare`` leaves out all before the first passage, as when a passage is encoded alone."""
    pieces: list[Piece] = []
    if system and not bare:
        pieces += [_role("system"), Piece(system, weights.question), _end(0.0)]
    for number, turn in enumerate(turns):
        if number or not bare:
            pieces.append(_role("user"))
        pieces += _user(turn, weights)
        pieces += [_end(0.0), _role("assistant"), *_answer(turn, weights.answer)]
    return pieces


def _answer(turn: Turn, weight: float) -> list[Piece]:
    """The answer as one piece, so that it has the tokens of a whole text whatever counts how much."""
    told = turn.emphasis
    answer = Piece(turn.answer, weight * told.token, starts=turn.starts, start_weight=weight * told.start)
    return [answer, _end(weight * told.end)]


def _user(turn: Turn, weights: Weights) -> list[Piece]:
    pieces: list[Piece] = []
    for number, passage in enumerate(turn.passages):
        label = turn.labels[number] if turn.labels else ""
        lead = (GLUE if number else "") + (label + GLUE if label else "")
        if lead:
            pieces.append(Piece(lead, 0.0))
        pieces.append(Piece(passage, weights.passage, is_passage=True))
    question = (GLUE if turn.passages else "") + turn.question
    return [*pieces, Piece(question, weights.question)]


def _role(role: str) -> Piece:
    return Piece(f"<|{role}|>", 0.0, special=True)


def _end(weight: float) -> Piece:
    return Piece("<|end|>", weight, special=True)


class Encoder:
    """A tokenizer for data: special tokens spelled in text stay text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text by itself."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def special(self, token: str) -> int:
        """The id of a special token.

        Raises:
            ValueError: the vocabulary has no such token.
        """
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the vocabulary lacks {token!r}; train it with hypic_apps.train.vocabulary.")
        return int(found)

    def row(self, pieces: Sequence[Piece], known: Mapping[str, list[int]] | None = None) -> Row:
        """The row of some pieces; ``known`` has ids of texts that were encoded already."""
        encoded = dict(known or {})
        new = list(dict.fromkeys(piece.text for piece in pieces if not piece.special and piece.text not in encoded))
        encoded |= zip(new, self.texts(new), strict=True)
        ids: list[int] = []
        weights: list[float] = []
        spans: list[tuple[int, int]] = []
        for piece in pieces:
            run = [self.special(piece.text)] if piece.special else encoded[piece.text]
            spans += [(len(ids), len(ids) + len(run))] if piece.is_passage else []
            ids += run
            weights += self._weights(piece) if piece.starts else [piece.weight] * len(run)
        return Row(np.array(ids, np.int64), np.array(weights, np.float32), tuple(spans))

    def _weights(self, piece: Piece) -> list[float]:
        """The weight of every token of a piece with items; offsets tell which tokens begin one."""
        ends = [end for _, end in self.tokenizer.encode(piece.text, add_special_tokens=False).offsets]
        weights = [piece.weight] * len(ends)
        for start in piece.starts:
            first = bisect_right(ends, start)
            weights[first : first + NUM_DECIDING] = [piece.start_weight] * len(ends[first : first + NUM_DECIDING])
        return weights
