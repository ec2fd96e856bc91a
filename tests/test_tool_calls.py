"""Reasoning, content and tool calls out of a model's text, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hypic.tool_calls import Part, Reply, ReplyParser, ToolCall, opens_reasoning, parse_reply

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array"},
                "options": {"$ref": "#/$defs/Options"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F"]},
                "level": {"enum": [1, 2]},
                "free": {},
            },
            "$defs": {"Options": {"type": "object"}},
        },
    },
}
TOOLS = [WEATHER]
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'


def xml(**values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=weather>\n{inner}</function>\n</tool_call>"


def streamed(text: str, sizes: list[int], tools: Any = TOOLS, *, in_reasoning: bool = False) -> list[Part]:
    parser, parts = ReplyParser(tools, in_reasoning=in_reasoning), []
    for size in [*sizes, len(text)]:
        parts += parser.push(text[:size])
        text = text[size:]
    return [*parts, *parser.finish()]


def one_call(text: str) -> ToolCall:
    reply = parse_reply(text, TOOLS)
    assert len(reply.calls) == 1, reply
    return reply.calls[0]


def test_plain_text_comes_back_to_the_character() -> None:
    for text in ("", " ", "\n It was. \n", "a < b <tool", "<think", "x <think>y</think>", "Hello </think>"):
        assert parse_reply(text, TOOLS) == Reply(text)
        assert parse_reply(text) == Reply(text)


def test_reasoning_is_split_off() -> None:
    expected = Reply("It was.", "Let me\n see.")
    assert parse_reply("<think>\nLet me\n see.\n</think>\n\nIt was.") == expected
    assert parse_reply("\n<think>Let me\n see.</think>It was.") == expected
    assert parse_reply("Let me\n see.\n</think>\n\nIt was.", in_reasoning=True) == expected
    assert parse_reply("<think>Let me\n see.\n</think>\n\nIt was.", in_reasoning=True) == expected
    assert parse_reply("<think>\n\n</think>\n\nIt was.") == Reply("It was.")
    assert parse_reply("<think>Let me") == Reply("", "Let me")
    assert parse_reply("Let me", in_reasoning=True) == Reply("", "Let me")
    assert parse_reply("<think>a <tool_call> b</think>c", TOOLS) == Reply("c", "a <tool_call> b")


def test_both_spellings_give_calls() -> None:
    reply = parse_reply(f"<think>Hm.</think>\n\nI look.\n\n{XML}\n{HERMES}\n", TOOLS)
    assert (reply.content, reply.reasoning, reply.notes) == ("I look.", "Hm.", ())
    first, second = reply.calls
    assert first == ToolCall("weather", {"city": "Köln"}, 0)
    assert second == ToolCall("weather", {"city": "Köln", "days": 2}, 1)
    assert second.arguments_json == '{"city": "Köln", "days": 2}'
    assert parse_reply(f"{XML}\nDone.", TOOLS).content == "Done."
    assert parse_reply(f"One.\n{XML}\nTwo.", TOOLS).content == "One.\n\nTwo."


def test_without_tools_nothing_is_a_call() -> None:
    for tools in (None, []):
        assert parse_reply(XML, tools) == Reply(XML)
        assert parse_reply(f"<think>a</think>{HERMES}", tools) == Reply(HERMES, "a")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "42", "42"),
        ("city", "null", "null"),
        ("city", "a\n\n b ", "a\n\n b "),
        ("city", "", ""),
        ("days", "3", 3),
        ("days", " 3.0 ", 3),
        ("days", "-7", -7),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("exact", "true", True),
        ("exact", "False", False),
        ("tags", '["a", 1]', ["a", 1]),
        ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("limit", "null", None),
        ("limit", "5", 5),
        ("unit", "C", "C"),
        ("level", "2", 2),
        ("free", "5", "5"),
        ("unheard", "5", "5"),
    ],
)
def test_values_are_typed_by_the_schema(key: str, text: str, value: Any) -> None:
    call = one_call(xml(**{key: text}))
    assert call.arguments == {key: value} and type(call.arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [("days", "three"), ("days", "1.5"), ("days", "true"), ("exact", "1"), ("tags", "{}"), ("share", "1e999")],
)
def test_a_value_that_does_not_fit_is_passed_on_as_text_with_a_note(key: str, text: str) -> None:
    reply = parse_reply(xml(**{key: text}), TOOLS)
    assert reply.calls[0].arguments == {key: text}
    assert len(reply.notes) == 1 and f"weather.{key}" in reply.notes[0] and text in reply.notes[0]


def test_tools_without_wrapper_or_schema_and_unknown_names() -> None:
    assert parse_reply(xml(days="3"), [WEATHER["function"]]).calls[0].arguments == {"days": 3}  # type: ignore[list-item]
    assert parse_reply(xml(days="3"), [{"name": "weather"}]).calls[0].arguments == {"days": "3"}
    assert parse_reply(xml(days="3"), [{"name": "other"}]).calls[0] == ToolCall("weather", {"days": "3"})


def test_calls_without_arguments() -> None:
    assert one_call("<tool_call><function=weather></function></tool_call>").arguments == {}
    assert one_call('<tool_call>{"name": "weather"}</tool_call>').arguments == {}
    quoted = '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>'
    assert one_call(quoted).arguments == {"days": 1}


def test_tags_inside_values_end_nothing() -> None:
    code = 'print("</tool_call> </parameter> <parameter> <function=x>")'
    assert one_call(xml(city=code)).arguments == {"city": code}
    body = json.dumps({"name": "weather", "arguments": {"city": "a </tool_call> b"}})
    assert one_call(f"<tool_call>{body}</tool_call>").arguments == {"city": "a </tool_call> b"}


def test_a_closing_tag_may_be_missing_at_the_end() -> None:
    for text in (XML, HERMES):
        assert len(parse_reply(text.removesuffix("\n</tool_call>"), TOOLS).calls) == 1


MALFORMED = [
    ("<tool_call>nonsense</tool_call>", "neither JSON"),
    ("<tool_call></tool_call>", "neither JSON"),
    ("<tool_call>", "neither JSON"),
    ('<tool_call>{"name": "weather", "arguments": {</tool_call>', "not JSON"),
    ('<tool_call>{"arguments": {}}</tool_call>', "no name"),
    ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "no JSON object"),
    ('<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', "NaN"),
    ('<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>', "surrogates"),
    ('<tool_call>{"name": "weather", "arguments": ' + "[" * 100_000 + "}</tool_call>", "nested"),
    ("<tool_call><function=weather><parameter=city>Kö", "cut off"),
    ("<tool_call><function=weather></tool_call>", "has no end"),
    ("<tool_call><function=weather>stray</function></tool_call>", "text beside"),
    ("<tool_call><function=weather><parameter=city>a</function></tool_call>", "does not end"),
]


@pytest.mark.parametrize(("text", "why"), MALFORMED)
def test_a_malformed_call_stays_text_with_a_note(text: str, why: str) -> None:
    reply = parse_reply(f"Look:\n{text}", TOOLS)
    assert reply.content == f"Look:\n{text}" and reply.calls == ()
    assert len(reply.notes) == 1 and why in reply.notes[0]


def test_a_sound_call_behind_a_malformed_one_is_read() -> None:
    for text, _ in MALFORMED:
        reply = parse_reply(f"{text}\n{XML}", TOOLS)
        assert [call.arguments for call in reply.calls] == [{"city": "Köln"}], text[:80]
        assert reply.content.strip() == text and len(reply.notes) == 1


def test_talking_about_the_tag_is_text_at_once() -> None:
    parser = ReplyParser(TOOLS)
    parts = parser.push("Write <tool_call> and then")
    assert Reply.of(parts).content == "Write <tool_call> and then"


def test_text_is_given_on_as_soon_as_it_is_certain() -> None:
    parser = ReplyParser(TOOLS)
    assert parser.push("It") == [Part("It")]
    assert parser.push(" ") == []
    assert parser.push("was <tool") == [Part(" was")]
    assert parser.push("box>") == [Part(" <toolbox>")]
    assert parser.push(XML[:-1]) == []
    assert parser.push(XML[-1]) == [Part(call=ToolCall("weather", {"city": "Köln"}))]
    assert parser.finish() == []


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=days>"),
    *("</parameter>", "3", "x", " ", "\n", "{", "}", '"', '{"name": "weather", "arguments": {"city": "a"}}', "<", "</"),
    *(XML, HERMES, "Kö🙂", '{"name": "weather", "arguments": {"city": "</tool_call>'),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@given(TEXTS, st.lists(st.integers(0, 9), max_size=60), st.booleans(), st.booleans())
@example("\n<tool_call>" + XML, [1] * 40, True, False)
def test_how_the_text_is_cut_changes_nothing(text: str, sizes: list[int], with_tools: bool, thinking: bool) -> None:
    tools = TOOLS if with_tools else None
    whole = parse_reply(text, tools, in_reasoning=thinking)
    assert Reply.of(streamed(text, sizes, tools, in_reasoning=thinking)) == whole
    assert Reply.of(streamed(text, [1] * len(text), tools, in_reasoning=thinking)) == whole


@given(TEXTS)
def test_nothing_is_lost_and_nothing_is_made_up(text: str) -> None:
    """Every character of the content stands in the text, in order; without marks the content is the text."""
    reply = parse_reply(text, TOOLS)
    rest = iter(text)
    assert all(char in rest for char in reply.reasoning + reply.content)
    if not reply.calls and not reply.reasoning and not text.lstrip().startswith("<think>"):
        assert reply.content == text


class Pieces:
    """A tokenizer whose template ends every prompt with ``end``."""

    def __init__(self, end: str) -> None:
        self.end, self.kwargs = end, {}  # type: tuple[str, Any]

    def encode(self, prompt: Any, *, tools: Any = None, chat_template_kwargs: Any = None) -> list[Any]:
        self.kwargs = chat_template_kwargs
        return [type("Piece", (), {"ids": tuple(map(ord, self.end))})()]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("end", "opens"),
    [("assistant\n", False), ("assistant\n<think>\n", True), ("assistant\n<think>\n\n</think>\n\n", False)],
)
def test_templates_that_open_the_reasoning_are_known(end: str, opens: bool) -> None:
    tokenizer = Pieces(end)
    assert opens_reasoning(tokenizer, {"enable_thinking": opens}) is opens
    assert tokenizer.kwargs == {"enable_thinking": opens}
