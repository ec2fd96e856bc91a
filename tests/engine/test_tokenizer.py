"""Prompts to pieces: what is a segment, where glue and white space go, and generated text that comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic import Prompt, Segment
from hypic.engine.id_memory import IdMemory
from hypic.engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import CHATML, save_bytelevel
from tests.engine.tokenized import ASSISTANT, END, USER, shown, user_pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bytelevel(tmp_path_factory.mktemp("bytelevel"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


# -- prompts


def test_a_prompt_becomes_a_system_and_a_user_message(tokenizer: Tokenizer) -> None:
    prompt = Prompt(
        [Segment("Passage A."), Segment("You answer.", kind="system"), Segment("Skill.", kind="skill")], "Who?"
    )
    assert shown(tokenizer, tokenizer.encode(prompt)) == [
        "<|im_start|>system\nYou answer.!",
        END + USER + "!",
        "[Passage A.]",
        "\n\n",
        "[Skill.]",
        "\n\nWho?!",
        END + ASSISTANT,
    ]


def test_only_leading_system_text_is_live(tokenizer: Tokenizer) -> None:
    texts = [Segment(text, kind="system") for text in ("Rules.", "More rules.")]
    assert shown(tokenizer, tokenizer.encode(Prompt(texts, "Who?")))[:3] == [
        "<|im_start|>system\nRules.\n\n!",
        "[More rules.]!",
        END + USER + "Who?!",
    ]


def test_a_string_is_one_live_user_message(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, tokenizer.encode("Who?")) == [USER + "Who?!", END + ASSISTANT]


@pytest.mark.parametrize(
    ("kind", "is_segment"),
    [("document", True), ("skill", True), ("memory", True), ("turn", True), ("tool", False)],
)
def test_kinds_and_the_flag_that_overrides_them(tokenizer: Tokenizer, kind: Any, is_segment: bool) -> None:
    assert user_pieces(tokenizer, Prompt([Segment("Text.", kind=kind)])) == (["[Text.]!"] if is_segment else ["Text.!"])
    assert user_pieces(tokenizer, Prompt([Segment("Text.", kind=kind, cache=True)])) == ["[Text.]!"]
    assert user_pieces(tokenizer, Prompt([Segment("Text.", kind=kind, cache=False)])) == ["Text.!"]


def test_system_text_at_the_head_can_be_made_a_segment(tokenizer: Tokenizer) -> None:
    pieces = shown(tokenizer, tokenizer.encode(Prompt([Segment("Rules.", kind="system", cache=True)], "Who?")))
    assert pieces[:2] == ["<|im_start|>system\n!", "[Rules.]!"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["A", "B"], ["[A]", "\n\n", "[B]", "\n\nQ!"]),
        (["A\n", "B"], ["[A]", "\n", "[B]", "\n\nQ!"]),
        (["A", "  B"], ["[A]", "  ", "[B]", "\n\nQ!"]),
        (["A\n", " B\t"], ["[A]", "\n ", "[B]", "\tQ!"]),
        (["\n\nA", "B"], ["\n\n!", "[A]", "\n\n", "[B]", "\n\nQ!"]),
        (["A", "", "B"], ["[A]", "\n\n", "[B]", "\n\nQ!"]),
        (["A", " \n", "B"], ["[A]", " \n", "[B]", "\n\nQ!"]),
        (["", "  "], ["  Q!"]),
        ([], ["Q!"]),
    ],
)
def test_white_space_is_live_and_takes_the_place_of_glue(
    tokenizer: Tokenizer, texts: list[str], expected: list[str]
) -> None:
    assert user_pieces(tokenizer, Prompt([Segment(text) for text in texts], "Q")) == expected


def test_a_prompt_may_choose_its_glue_and_have_no_tail(tokenizer: Tokenizer) -> None:
    segments = [Segment("A"), Segment("Source 2: ", cache=False), Segment("B")]
    assert user_pieces(tokenizer, Prompt(segments, glue=" | ")) == ["[A]", " | Source 2:  | ", "[B]!"]
    assert user_pieces(tokenizer, Prompt(segments, glue="")) == ["[A]", "Source 2: ", "[B]!"]


def test_live_data_is_joined_before_it_is_encoded(tokenizer: Tokenizer) -> None:
    label = Prompt([Segment("A"), Segment("the comp", cache=False)], "any", glue="")
    live = tokenizer.encode(label)[2]
    assert live.ids == tuple(tokenizer.encode_text("the company"))
    assert live.ids != tuple(tokenizer.encode_text("the comp") + tokenizer.encode_text("any"))


def test_a_segments_ids_do_not_depend_on_where_it_stands(tokenizer: Tokenizer) -> None:
    alone = tuple(tokenizer.encode_text("The company."))
    for text in ("The company.", "\n\nThe company.", "The company.  \n"):
        pieces = tokenizer.encode(Prompt([Segment("Before"), Segment(text, name="n"), Segment("After")], "Q"))
        found = [piece for piece in pieces if piece.segment is not None and piece.segment.name == "n"]
        assert [piece.ids for piece in found] == [alone]
        assert found[0].segment == Segment("The company.", name="n")


@given(st.lists(st.text(alphabet="ab \n\té", max_size=6), max_size=4), st.text(alphabet="ab \n", max_size=4))
def test_no_character_is_lost_or_moved(tokenizer: Tokenizer, texts: list[str], tail: str) -> None:
    pieces = tokenizer.encode(Prompt([Segment(text) for text in texts], tail, glue=""))
    whole = tokenizer._control.decode([i for piece in pieces for i in piece.ids], skip_special_tokens=False)
    assert whole == USER + "".join(texts) + tail + END + ASSISTANT


# -- generated text that comes back


def test_generated_ids_are_used_when_their_text_returns(tokenizer: Tokenizer) -> None:
    spelled_out = [i for c in "Ada!" for i in tokenizer.encode_text(c)]
    assert spelled_out != tokenizer.encode_text("Ada!")
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Ad"}, {"type": "text", "text": "a!"}]},
    ]
    before = tokenizer.encode(messages)
    assert tokenizer.num_encoded_anew(messages) == 1
    tokenizer.remember("Ada!", [*spelled_out, *tokenizer.eos_ids])
    after = tokenizer.encode(messages)
    assert tokenizer.num_encoded_anew(messages) == 0 == tokenizer.num_encoded_anew("Ada!")
    assert shown(tokenizer, before) == shown(tokenizer, after)
    assert after[1].ids[-len(spelled_out) :] == tuple(spelled_out) and after[1].ids != before[1].ids
    as_user = tokenizer.encode("Ada!")
    assert as_user[0].ids[-len(tokenizer.encode_text("Ada!")) :] == tuple(tokenizer.encode_text("Ada!"))


def test_memory_is_bounded_and_forgets_the_least_recently_used() -> None:
    memory = IdMemory(max_ids=10)
    for text in "abc":
        memory.put(text, [1, 2, 3])
    memory.get("a")
    memory.put("d", [4, 5, 6, 7])
    assert [memory.get(text) for text in "abcd"] == [(1, 2, 3), None, (1, 2, 3), (4, 5, 6, 7)]
    memory.put("long", list(range(11)))
    assert [memory.get(text) for text in ("a", "d", "long")] == [None, None, None]
    assert memory._num_ids == 0


def test_a_text_is_encoded_once(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    first = tokenizer.encode(Prompt([Segment("The company."), Segment("A passage.")], "Who?"))
    tokenizer._data = tokenizer._control = None  # type: ignore[assignment]
    again = tokenizer.encode(Prompt([Segment("A passage."), Segment("The company.", name="n")], "Who?"))
    assert sorted(p.ids for p in again if p.segment) == sorted(p.ids for p in first if p.segment)
    with pytest.raises(AttributeError):
        tokenizer.encode_text("new")


def test_threads_may_share_one(tokenizer: Tokenizer) -> None:
    prompts = [Prompt([Segment(f"Passage {n % 5}.")], f"Question {n}?") for n in range(200)]
    expected = [tokenizer.encode(prompt) for prompt in prompts]
    fresh = Tokenizer(tokenizer.path)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fresh.encode, prompts)) == expected


def test_the_marker_cannot_be_forged(tokenizer: Tokenizer) -> None:
    """A text that looks like a marker of another rendering is text."""
    forged = "0" * 24 + "c0z"
    assert shown(tokenizer, tokenizer.encode(forged))[0] == USER + forged + "!"
    assert CHATML.count("content") >= 4
