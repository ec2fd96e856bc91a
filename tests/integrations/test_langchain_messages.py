"""LangChain messages in the engine's form: hints, borders, white space, and flat text cut again."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from hypic.engine.messages import split_turns
from hypic.errors import ConfigError
from hypic.integrations._common import KnownTexts, Request
from hypic.integrations.langchain import segment
from hypic.integrations.langchain.messages import message_request
from hypic.registry import Registry
from hypic.types import Segment
from tests.integrations.scripted import bodies, said, segments

PAGES = ["The Alpha mill was built in 1871 on the Lenne.", "The Beta bridge was opened in 1902, with two tracks."]


def known(*texts: str | Segment, namespace: str | None = None) -> KnownTexts:
    registry = Registry()
    registry.register(texts, namespace=namespace)
    return KnownTexts(registry, namespace, True)


def asked(*messages: BaseMessage, texts: KnownTexts | None = None) -> Request:
    return message_request(messages, known() if texts is None else texts)


def test_plain_messages_stay_plain() -> None:
    last = ChatMessage(content="x", role="developer")
    request = asked(SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hi."), last)
    assert request.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "developer", "content": "x"},
    ]


def test_blocks_pass_with_their_hints_and_nothing_else() -> None:
    block = {**segment(PAGES[0], "skill", name="s", source="f"), "cache_control": {"type": "ephemeral"}, "index": 3}
    other = {"type": "text", "text": "x", "extras": {"other": 1, "hypic": {"id": "old"}}}
    request = asked(HumanMessage([block, other, "y"]))
    assert request.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": PAGES[0], "extras": {"hypic": {"kind": "skill", "name": "s", "source": "f"}}},
                {"type": "text", "text": "x", "extras": {"hypic": {"name": "old"}}},
                {"type": "text", "text": "y"},
            ],
        }
    ]


@pytest.mark.parametrize("inside", [True, False])
def test_hints_that_do_not_exist_are_refused(inside: bool) -> None:
    def block(hints: object) -> dict[str, Any]:
        place = {"extras": {"hypic": hints}} if inside else {"hypic": hints}
        return {"type": "text", "text": PAGES[0], **place}

    read = asked(HumanMessage([block({"kind": "document", "namespace": "alice"}), "y"]))
    assert segments(read.prompt) == [Segment(PAGES[0], namespace="alice")]
    expected = r"'namespce' \(did you mean 'namespace'\?\); known are kind, .*seam"
    with pytest.raises(ModelInvalidRequestError, match=expected):
        asked(HumanMessage([block({"kind": "document", "namespce": "alice"}), "y"]))
    with pytest.raises(ModelInvalidRequestError, match="hint 7; known are kind"):
        asked(HumanMessage([block({7: 1})]))
    with pytest.raises(ModelInvalidRequestError, match="'alice'; pass a mapping"):
        asked(HumanMessage([block("alice")]))


def test_hints_of_a_whole_message_are_refused() -> None:
    for hints in ({"namespace": "alice"}, "alice"):
        with pytest.raises(ModelInvalidRequestError, match="blocks|mapping with glue"):
            asked(HumanMessage(PAGES[0], additional_kwargs={"hypic": hints}))


def test_plain_text_blocks_and_refused_ones() -> None:
    plain = {"type": "text-plain", "text": PAGES[0], "title": "Mills", "mime_type": "text/plain", "source_type": "text"}
    request = asked(HumanMessage([plain, {"type": "text", "text": "When?"}]))
    assert said(request.prompt) == [("user", f"Mills\n\n{PAGES[0]}\n\nWhen?")]
    assert bodies(request.prompt) == [PAGES[0]]
    others: list[BaseMessage] = [HumanMessage([{"type": kind}]) for kind in ("video", "reasoning")]
    for refused in [*others, RemoveMessage(id="1")]:
        with pytest.raises(ModelInvalidRequestError):
            asked(refused)
    with pytest.raises(ConfigError, match="'poem'"):
        asked(HumanMessage([{"type": "text", "text": "x", "extras": {"hypic": {"kind": "poem"}}}]))


def test_a_pinned_skill_is_a_segment() -> None:
    marks = {"lc_source": "pinned_skill", "skill": {"name": "brief", "path": "/s/SKILL.md"}}
    request = asked(HumanMessage(PAGES[0], additional_kwargs=marks))
    assert segments(request.prompt) == [Segment(PAGES[0], "skill", name="brief", source="/s/SKILL.md")]


@pytest.mark.parametrize("message", [HumanMessage, SystemMessage, lambda text: ToolMessage(text, tool_call_id="1")])
def test_flat_text_is_cut_without_loss(message: Any) -> None:
    text = f"Now:({PAGES[0]})\n{PAGES[1]}\nWhen?"
    request = asked(message(text), texts=known(Segment(PAGES[0], name="a"), PAGES[1]))
    assert [t for _, t in said(request.prompt)] == [text]
    assert segments(request.prompt) == [Segment(PAGES[0], name="a"), Segment(PAGES[1])]
    assert [text[f.start : f.end] for f in request.found] == PAGES
    assert "known-texts" in request.notes[0]


def test_answers_and_marked_blocks_are_never_cut() -> None:
    marked = segment(f"{PAGES[0]} {PAGES[1]}")
    request = asked(HumanMessage([marked]), AIMessage(f"It says: {PAGES[0]}"), texts=known(*PAGES))
    assert bodies(request.prompt) == [f"{PAGES[0]} {PAGES[1]}"]
    assert request.found == ()


def test_one_block_among_several_is_cut_where_white_space_allows() -> None:
    blocks: list[Any] = ["Rules.", f"Context:\n{PAGES[0]}\n({PAGES[1]})", "When?"]
    whole = asked(HumanMessage(blocks))
    request = asked(HumanMessage(blocks), texts=known(*PAGES))
    assert said(request.prompt) == said(whole.prompt)
    assert bodies(request.prompt) == ["Rules.", "Context:", PAGES[0], f"({PAGES[1]})"]
    assert [f.block for f in request.found] == [1]
    head = asked(SystemMessage([f"Head\n{PAGES[0]}", "More."]), texts=known(*PAGES))
    assert bodies(head.prompt) == [PAGES[0], "More."]


def test_tool_results_hint_at_documents_by_their_artifact() -> None:
    documents = [Document(id="a", page_content=PAGES[0]), Document(id="b", page_content=PAGES[1])]
    call = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    result = ToolMessage("\n\n".join(PAGES), tool_call_id="1", artifact=documents)
    request = asked(HumanMessage("When?"), call, result)
    assert [s.name for s in segments(request.prompt)] == ["a", "b"]
    assert said(request.prompt)[2] == ("tool", "\n\n".join(PAGES))
    plain = asked(HumanMessage("When?"), call, ToolMessage("\n\n".join(PAGES), tool_call_id="1", artifact={"x": 1}))
    assert segments(plain.prompt) == []


def test_what_is_marked_becomes_known_in_its_namespace() -> None:
    texts = known(namespace="n")
    asked(HumanMessage([segment(PAGES[0], name="a"), segment(PAGES[1], cache=False)]), texts=texts)
    assert texts.registry is not None and len(texts.registry) == 1
    request = asked(HumanMessage(f"{PAGES[0]} {PAGES[1]}"), texts=texts)
    assert segments(request.prompt) == [Segment(PAGES[0], name="a", namespace="n")]


ALPHABET = "ab.\n "


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.text(ALPHABET, min_size=1, max_size=20), min_size=1, max_size=3),
    texts=st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=4),
    whole=st.booleans(),
)
def test_cutting_a_string_never_changes_the_text(blocks: list[str], texts: list[str], whole: bool) -> None:
    registry = Registry(min_chars=1)
    registry.register(texts)
    message = HumanMessage("".join(blocks) if whole else [{"type": "text", "text": "".join(blocks)}])
    assert said(asked(message, texts=KnownTexts(registry, None, True)).prompt) == said(asked(message).prompt)


def test_the_engine_leaves_glue_out_where_a_message_says_so() -> None:
    text = f"<c>{PAGES[0]}</c>When?"
    request = asked(HumanMessage(text), texts=known(PAGES[0]))
    (turn,) = split_turns(request.prompt)
    assert "".join(part.text for part in turn.parts) == text
