"""Chat messages to pieces: blocks, hints and templates, and that data gives no control ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hypic import Prompt, Segment
from hypic.engine.plan import Piece
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import PromptError
from tests.engine.tiny_tokenizers import PLAIN_ADDED, SPECIALS, save_bytelevel, save_sentencepiece, save_unigram
from tests.engine.tokenized import ASSISTANT, END, USER, shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bytelevel(tmp_path_factory.mktemp("bytelevel"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


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
