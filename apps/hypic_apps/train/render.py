"""From questions and passages to token ids, by the rules the engine follows when it answers.

Scaffolding is encoded with special tokens, every passage by itself, and the live text between and behind passages as
plain text: ``"\\n\\n"`` alone between two passages, ``"\\n\\n"`` and the question as one string. Text is data: a
special token spelled in it stays text.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Piece:
    """A run of text, or, if ``special``, one special token; ``weight`` is its tokens' weight in the loss."""

    text: str
    weight: float
    special: bool = False
    is_passage: bool = False


@dataclass(frozen=True)
class Turn:
    """A user message, passages then question, and the assistant's answer; ``weight`` is how much the answer counts."""

    passages: Sequence[str]
    question: str
    answer: str
    labels: Sequence[str] = ()
    weight: float = 1.0


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
        answer = weights.answer * turn.weight
        pieces += [_end(0.0), _role("assistant"), Piece(turn.answer, answer), _end(answer)]
    return pieces


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
            weights += [piece.weight] * len(run)
        return Row(np.array(ids, np.int64), np.array(weights, np.float32), tuple(spans))
