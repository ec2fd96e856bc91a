"""The tokenizer: nothing is lost, words look alike everywhere, special tokens only from the template."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic_apps.train.render import Encoder
from hypic_apps.train.vocabulary import SPECIAL_TOKENS, save

ODD = [
    "", "\n", "\n\n", " ", "  ", "a", " a", "a ", "a\n", "\na", "a\n\nb", "a\n \nb", "  def f():\n      return 1\n\n\n",
    "tab\tand\r\nreturn", "Übergröße – “quoted” naïve", "数字 123 и слова", "🙂🙂 emoji\n🙂", "x  y   z",
    "<|end|> stays text",
    "1874", " 1874", "In 1874,", "\u00a0hard\u00a0space", "e\u0301 combining", "\u0000nul",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_come_back_unchanged(encoder: Encoder, text: str) -> None:
    assert encoder.tokenizer.decode(encoder.texts([text])[0], skip_special_tokens=False) == text


@given(st.text(max_size=60))
def test_any_text_comes_back_unchanged(encoder: Encoder, text: str) -> None:
    assert encoder.tokenizer.decode(encoder.texts([text])[0], skip_special_tokens=False) == text


@given(st.text(st.sampled_from(" \nab1.<|>"), max_size=30))
def test_white_space_comes_back_unchanged(encoder: Encoder, text: str) -> None:
    assert encoder.tokenizer.decode(encoder.texts([text])[0], skip_special_tokens=False) == text


def test_a_word_has_the_same_tokens_at_a_start_and_inside(encoder: Encoder) -> None:
    inside = encoder.texts(["x Tolmab"])[0]
    alone, after_line = encoder.texts(["Tolmab", "x\n\nTolmab"])
    assert inside[-len(alone) :] == alone
    assert after_line[-len(alone) :] == alone


def test_digits_and_the_space_before_them_stand_alone(encoder: Encoder) -> None:
    ids = encoder.texts(["year 1874"])[0]
    assert [encoder.tokenizer.id_to_token(i) for i in ids[-5:]] == ["Ġ", "1", "8", "7", "4"]


def test_a_text_cut_at_a_blank_line_has_the_tokens_of_its_pieces(encoder: Encoder) -> None:
    first, second = "One passage.", "Another one, 12."
    whole, *pieces = encoder.texts([f"{first}\n\n{second}", first, "\n\n", second])
    assert whole == sum(pieces, [])
    question, *parts = encoder.texts(["\n\nWho is it?", "\n\n", "Who is it?"])
    assert question == sum(parts, [])


def test_special_tokens_spelled_in_text_stay_text(encoder: Encoder) -> None:
    specials = {encoder.special(token) for token in SPECIAL_TOKENS}
    assert not specials & set(encoder.texts(["<|user|>hello<|end|>"])[0])


def test_a_missing_special_token_is_named(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="nothing"):
        encoder.special("<|nothing|>")


def test_transformers_loads_it_and_the_template_marks_turns(encoder: Encoder, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(encoder.tokenizer, tmp_path, 128)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    prompt = loaded.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>Be short.<|end|><|user|>Who?<|end|><|assistant|>"
    answered = loaded.apply_chat_template([*asked, {"role": "assistant", "content": "Ann"}], tokenize=False)
    assert answered == prompt + "Ann<|end|>"
    assert loaded.eos_token == "<|end|>"
    assert loaded.decode(loaded("a\n b", add_special_tokens=False)["input_ids"]) == "a\n b"
