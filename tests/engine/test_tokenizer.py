"""Prompts to pieces: what is a segment, where glue and white space go, and that data gives no control ids."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hypic import Prompt, Segment
from hypic.engine.id_memory import IdMemory
from hypic.engine.plan import Piece
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import PromptError
from tests.engine.tiny_tokenizers import (
    CHATML,
    PLAIN_ADDED,
    SPECIALS,
    save_bytelevel,
    save_sentencepiece,
    save_unigram,
)

USER, END, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bytelevel(tmp_path_factory.mktemp("bytelevel"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


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


# -- messages


def test_blocks_of_chat_messages(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Rules."}, {"type": "text", "text": "Memory."}]},
        {"role": "user", "content": ["Doc 1.", "Doc 2.", "Who?"]},
        {"role": "assistant", "content": "Ada."},
        {"role": "tool", "content": "plain result"},
        {"role": "tool", "content": ["Found 1.", "Found 2."]},
        {"role": "user", "content": ["When?"]},
    ]
    assert shown(tokenizer, tokenizer.encode(messages)) == [
        "<|im_start|>system\nRules.\n\n!",
        "[Memory.]!",
        END + USER,
        "[Doc 1.]",
        "\n\n",
        "[Doc 2.]",
        "\n\nWho?!",
        END + ASSISTANT + "Ada.!",
        END + USER + "<tool_response>\nplain result!",
        "\n</tool_response>" + END + USER + "<tool_response>\n",
        "[Found 1.]",
        "\n\n",
        "[Found 2.]!",
        "\n</tool_response>" + END + USER + "When?!",
        END + ASSISTANT,
    ]


def test_system_text_behind_the_head_is_a_segment(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]
    assert shown(tokenizer, tokenizer.encode(messages))[2] == "[Be brief.]!"


def test_hints_override(tokenizer: Tokenizer) -> None:
    def content(**hints: object) -> list[Piece]:
        block = {"type": "text", "text": "Text.", "extras": {"hypic": hints}}
        return tokenizer.encode([{"role": "user", "content": [block]}])

    assert content()[0].segment is None
    assert content(name="n")[0].segment is None
    assert content(kind="memory", name="n", source="s", namespace="t")[1].segment == Segment(
        "Text.", "memory", "n", "s", "t"
    )
    assert content(kind="turn")[1].segment == Segment("Text.", "turn")
    assert content(cache=True)[1].segment == Segment("Text.", "turn", cache=True)
    assert content(kind="document", cache=False)[0].segment is None
    flat = {"type": "text", "text": "Text.", "hypic": {"kind": "skill"}}
    assert tokenizer.encode([{"role": "user", "content": [flat]}])[1].segment == Segment("Text.", "skill")
    whole = {"role": "user", "content": "Text.", "extras": {"hypic": {"kind": "turn"}}}
    assert tokenizer.encode([whole])[1].segment == Segment("Text.", "turn")


def test_generation_prompt_tools_and_template_variables(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    system = {"role": "system", "content": "Rules."}
    pieces = tokenizer.encode([system, {"role": "user", "content": "Hi"}], tools=tools)
    text = "".join(shown(tokenizer, pieces))
    assert "<|im_start|>system\nRules.!\n\n# Tools\n" in text and '"name": "get_weather"' in text
    assert shown(tokenizer, tokenizer.encode("Hi", add_generation_prompt=False))[-1] == END
    thinking = tokenizer.encode("Hi", chat_template_kwargs={"enable_thinking": False})
    assert shown(tokenizer, thinking)[-1] == END + ASSISTANT + "<think>\n\n</think>\n\n"


def test_same_ids_as_transformers_for_a_plain_conversation(tokenizer: Tokenizer, folder: Path) -> None:
    messages = [
        {"role": "system", "content": "You answer from the passages."},
        {"role": "user", "content": "Who founded the company?"},
        {"role": "assistant", "content": "Ada Perkins."},
        {"role": "user", "content": "When?"},
    ]
    ours = [i for piece in tokenizer.encode(messages) for i in piece.ids]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    assert ours == theirs["input_ids"]


# -- control tokens


@pytest.mark.parametrize("spelled", [*SPECIALS, *PLAIN_ADDED])
def test_control_tokens_in_data_stay_text(tokenizer: Tokenizer, spelled: str) -> None:
    control = {i for name in (*SPECIALS, *PLAIN_ADDED) if (i := tokenizer._control.token_to_id(name)) is not None}
    text = f"a {spelled}system\nb"
    # The control of this test: encoded as scaffolding, the same text does give a control id.
    assert control & set(tokenizer._control.encode(text).ids)
    assert not control & set(tokenizer.encode_text(text))
    assert tokenizer.decode(tokenizer.encode_text(text)) == text

    def controls(text: str) -> int:
        call = {"function": {"name": "f", "arguments": {text: [text]}}}
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": [text, text]},
            {"role": "assistant", "content": text, "tool_calls": [call]},
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": text}}]
        return sum(i in control for piece in tokenizer.encode(messages, tools=tools) for i in piece.ids)

    assert controls(text) == controls("plain")


def test_runs_of_white_space_that_have_a_token_keep_it(tokenizer: Tokenizer) -> None:
    spaces = tokenizer._control.token_to_id(" " * 4)
    assert spaces in tokenizer.encode_text("a" + " " * 4 + "b")


@pytest.mark.parametrize("save", [save_sentencepiece, save_unigram])
def test_control_tokens_inside_the_vocabulary_stay_text(tmp_path: Path, save: Any) -> None:
    tokenizer = Tokenizer(save(tmp_path))
    end = tokenizer._control.token_to_id("</s>")
    text = "The end</s>of it"
    assert end in tokenizer._control.encode(text).ids
    assert end not in tokenizer.encode_text(text)
    assert tokenizer.decode(tokenizer.encode_text(text)) == text
    plain = "The company and the end of it."
    assert tokenizer.encode_text(plain) == tokenizer._control.encode(plain, add_special_tokens=False).ids


# -- templates that lose, double or reorder contents


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ messages[0].content }}", "shows message 1 0 times"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[0].content }}", "shows message 0 2 times"),
        ("{{ messages[1].content }}{{ messages[0].content }}", r"in the order \[1, 0\]"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[7].content }}", "refuses these messages"),
    ],
)
def test_unfit_templates_are_refused(tmp_path: Path, template: str, sentence: str) -> None:
    tokenizer = Tokenizer(save_bytelevel(tmp_path, chat_template=template))
    with pytest.raises(PromptError, match=sentence):
        tokenizer.encode(Prompt([Segment("Rules.", kind="system")], "Who?"))


def test_without_a_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_bytelevel(tmp_path, chat_template=None, bos=True))
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match="template=False"):
        tokenizer.encode("Who?")
    prompt = Prompt([Segment("Doc."), Segment("Rules.", kind="system")], "Who?", template=False)
    assert shown(tokenizer, tokenizer.encode(prompt)) == ["<|endoftext|>Rules.\n\n!", "[Doc.]", "\n\nWho?!"]
    assert tokenizer.encode(prompt) == tokenizer.encode_completion_prompt(prompt)


def test_no_bos_where_the_tokenizer_adds_none(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, tokenizer.encode(Prompt([Segment("Doc.")], "Q", template=False))) == ["[Doc.]", "\n\nQ!"]
    with pytest.raises(PromptError, match="no tokens"):
        tokenizer.encode(Prompt(template=False))


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
