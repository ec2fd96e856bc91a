"""Prompts of random tokens, new in every repetition: as ids, or as text where there is a tokenizer.

Ids are drawn evenly from the whole vocabulary, never zeros and never the same twice, so that no cache, ours or a
chip's, and no router sees an easier prompt than a real one. A repetition asks the same documents in several orders.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypic.engine.plan import Piece
from hypic.engine.token_ids import TokenIds
from hypic.engine.tokenizer import Tokenizer
from hypic.types import Policy, Prompt, Segment
from hypic_apps.cli.errors import InputError

WORD = re.compile(r" [a-z]{3,}")
Ids = tuple[int, ...]
Pieces = Callable[[], Sequence[Piece]]


@dataclass(frozen=True)
class Shape:
    """``num_segments`` of ``segment_tokens``, then a tail; ``head_tokens`` of live text are the same in all prompts.

    With ``vary``, a share from 0 to below 1, segments of every repetition have other lengths: each is up to that share
    longer or shorter. One that is longer goes with one that is as much shorter, so that only the last of an odd number
    changes the whole."""

    num_segments: int
    segment_tokens: int
    tail_tokens: int
    head_tokens: int = 0
    vary: float = field(default=0.0, repr=False)  # what is drawn without it is seeded by the text of a shape

    @property
    def num_tokens(self) -> int:
        """Of a prompt whose segments do not vary."""
        return self.head_tokens + self.num_segments * self.segment_tokens + self.tail_tokens

    @property
    def most_varied(self) -> int:
        """Tokens by which a segment may be longer or shorter."""
        return int(self.vary * self.segment_tokens)

    @property
    def most_tokens(self) -> int:
        """Of the longest prompt."""
        return self.num_tokens + self.num_segments % 2 * self.most_varied

    def lengths(self, seed: str) -> list[int]:
        """Tokens of each segment, the same for the same ``seed``."""
        draw = random.Random(f"lengths {seed}")
        most = self.most_varied
        more = [draw.randint(-most, most) for _ in range((self.num_segments + 1) // 2)]
        changes = [*more, *(-n for n in more)][: self.num_segments]
        draw.shuffle(changes)
        return [self.segment_tokens + change for change in changes]


def check_cached(shapes: Sequence[Shape], policy: Policy) -> None:
    """
    Raises:
        InputError: segments are so short, or may come to be, that they are always run live.
    """
    shape = min(shapes, key=lambda shape: shape.segment_tokens - shape.most_varied)
    least = shape.segment_tokens - shape.most_varied
    if not policy.with_(reuse="segments").interiors(least):
        shortest = max(policy.shortest, policy.seam + policy.tail_seam + 1)
        way_out = f"pass --segment-tokens {shortest} or more" + (", or a smaller --vary" if shape.vary else "")
        raise InputError(f"segments of {least} tokens are run live; {way_out}.")


@dataclass(frozen=True)
class IdsSource:
    """Prompts as token ids: nothing is tokenised. A document's are packed once, as those of a text that a tokenizer
    knows."""

    vocab_size: int
    seed: int = 0

    def documents(self, shape: Shape, number: int) -> list[Ids]:
        """The documents of repetition ``number``."""
        draw = random.Random(seed := f"{self.seed}|{number}|{shape}")
        return [self._ids(draw, length) for length in shape.lengths(seed)]

    def prompt(self, shape: Shape, documents: Sequence[Ids], salt: str) -> Pieces:
        """The documents in the given order behind the head, then a tail of its own for each ``salt``."""
        head = self._ids(random.Random(f"{self.seed}|head"), shape.head_tokens)
        tail = self._ids(random.Random(f"{self.seed}|{salt}"), shape.tail_tokens)
        middle = [self.segment(ids) for ids in documents]
        pieces = [Piece(head, None, ends_message=True), *middle, Piece(tail)]
        return lambda: pieces

    def segment(self, document: Ids) -> Piece:
        return Piece(document, Segment(""))

    def _ids(self, draw: random.Random, count: int) -> Ids:
        return TokenIds(draw.choices(range(self.vocab_size), k=count))


@dataclass(frozen=True)
class TextSource:
    """Prompts as text of random words that are one token each, through the chat template; see ``IdsSource``.

    With ``beforehand`` they are tokenised outside of what is measured.
    """

    tokenizer: Tokenizer
    words: Sequence[str]
    beforehand: bool = False
    seed: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, *, beforehand: bool, seed: int = 0) -> TextSource:
        """Raises ``InputError`` where the vocabulary has no such words."""
        (*_, first) = tokenizer.encode_text("the")  # a blank at the head of a text would not be shown
        texts = (tokenizer.decode([first, number]) for number in range(vocab_size))
        words = [text.removeprefix("the") for text in texts if WORD.fullmatch(text.removeprefix("the"))]
        if not words:
            raise InputError("this checkpoint's vocabulary has no token for a whole word; pass --ids with a geometry.")
        return cls(tokenizer, words, beforehand, seed)

    def documents(self, shape: Shape, number: int) -> list[str]:
        draw = random.Random(seed := f"{self.seed}|{number}|{shape}")
        return [self._text(draw, length) for length in shape.lengths(seed)]

    def prompt(self, shape: Shape, documents: Sequence[str], salt: str) -> Pieces:
        tail = self._text(random.Random(f"{self.seed}|{salt}"), shape.tail_tokens)
        prompt = Prompt([Segment(text) for text in documents], tail)
        if not self.beforehand:
            return lambda: self.tokenizer.encode(prompt)
        pieces = self.tokenizer.encode(prompt)
        return lambda: pieces

    def segment(self, document: str) -> Piece:
        return self.tokenizer.segment_piece(Segment(document))

    def _text(self, draw: random.Random, count: int) -> str:
        return "".join(draw.choices(self.words, k=count)).strip()


Source = IdsSource | TextSource


def shuffled(documents: Sequence[str] | Sequence[Ids], number: int) -> list[int]:
    """Another order of the documents, by their numbers, that no repetition shares with another by more than chance."""
    order = list(range(len(documents)))
    random.Random(f"order {number}").shuffle(order)
    return order
