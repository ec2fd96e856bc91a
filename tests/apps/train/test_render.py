"""Training rows against the engine's tokenizer on the bundled vocabulary: what was trained on is what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Vocabulary

from hypic import Prompt, Segment
from hypic.checkpoints import bundled
from hypic.engine.tokenizer import Tokenizer
from hypic.types import PromptLike
from hypic_apps.train.render import Encoder, Turn, Weights, conversation

PASSAGES = [
    "Velwick\n\nVelwick is a town of 12,500 people. It has <|end|> no harbour.",
    "# Company handbook\n- Leave | 27 days",
    "Ünder 3 °C – «closed»",
]
SYSTEM, QUESTION, ANSWER = "Answer briefly.", "How many people live in Velwick?", "12,500"


@pytest.fixture(scope="module")
def engine() -> Tokenizer:
    return Tokenizer(bundled())


@pytest.fixture(scope="module")
def bundled_encoder() -> Encoder:
    return Encoder(Vocabulary.from_file(str(bundled() / "tokenizer.json")))


def ids(engine: Tokenizer, prompt: PromptLike, **options: Any) -> list[int]:
    return [i for piece in engine.encode(prompt, **options) for i in piece.ids]


def row(encoder: Encoder, turns: Sequence[Turn], system: str = "") -> list[int]:
    return [int(i) for i in encoder.row(conversation(turns, Weights(), system)).ids]


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("system", ["", SYSTEM])
def test_a_row_has_the_ids_of_its_prompt_and_answer(
    engine: Tokenizer, bundled_encoder: Encoder, system: str, number: int
) -> None:
    segments = [Segment(system, kind="system")] if system else []
    segments += [Segment(text) for text in PASSAGES[:number]]
    prompt = ids(engine, Prompt(segments, QUESTION))
    expected = [*prompt, *engine.encode_text(ANSWER), bundled_encoder.special("<|end|>")]
    assert row(bundled_encoder, [Turn(PASSAGES[:number], QUESTION, ANSWER)], system) == expected


def test_a_chat_of_several_turns_has_the_ids_of_its_messages(engine: Tokenizer, bundled_encoder: Encoder) -> None:
    documents = [{"type": "text", "text": text, "hypic": {"kind": "document"}} for text in PASSAGES]
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [*documents, {"type": "text", "text": QUESTION, "hypic": {"cache": False}}]},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And the harbour?"},
        {"role": "assistant", "content": "no harbour"},
    ]
    turns = [Turn(PASSAGES, QUESTION, ANSWER), Turn((), "And the harbour?", "no harbour")]
    expected = ids(engine, messages, add_generation_prompt=False)
    assert row(bundled_encoder, turns, SYSTEM) == expected


def test_labels_before_passages_are_live_text(engine: Tokenizer, bundled_encoder: Encoder) -> None:
    labels = [f"[{number}]" for number in range(1, 4)]
    pairs = zip(labels, PASSAGES, strict=True)
    segments = [s for label, text in pairs for s in (Segment(label, cache=False), Segment(text))]
    expected = [*ids(engine, Prompt(segments, QUESTION)), *engine.encode_text(ANSWER)]
    turn = Turn(PASSAGES, QUESTION, ANSWER, labels)
    assert row(bundled_encoder, [turn])[:-1] == expected
