"""Pieces of a prompt as they are compared in tests of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from hypic import Prompt
from hypic.engine.plan import Piece
from hypic.engine.tokenizer import Tokenizer

USER, END, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"


def shown(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[str]:
    """Each piece as text with its control tokens: ``[segment]``, and ``!`` behind a point that ends a message."""
    texts = [tokenizer._control.decode(list(p.ids), skip_special_tokens=False) for p in pieces]
    return [
        (f"[{text}]" if piece.segment else text) + "!" * piece.ends_message
        for piece, text in zip(pieces, texts, strict=True)
    ]


def user_pieces(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """The pieces of a prompt without a system message, between the scaffolding around the user's message."""
    pieces = shown(tokenizer, tokenizer.encode(prompt))
    assert pieces[0].startswith(USER) and pieces[-1] == END + ASSISTANT
    head = pieces[0].removeprefix(USER)
    return ([] if head == "!" else [head]) + pieces[1:-1]
