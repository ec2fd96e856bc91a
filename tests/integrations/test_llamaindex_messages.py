"""LlamaIndex messages in the engine's form: blocks, hints, roles, tool calls."""

from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    AudioBlock,
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)

from hypic.engine.messages import split_turns
from hypic.errors import PromptError
from hypic.integrations._common import KnownTexts, Request
from hypic.integrations.llamaindex import segment_message
from hypic.integrations.llamaindex.messages import message_request
from hypic.registry import Registry
from hypic.types import Segment
from tests.integrations.scripted import bodies, said, segments

PAGES = ["The Alpha mill was built in 1871 on the Lenne.", "The Beta bridge was opened in 1902, with two tracks."]
CITED = CitationBlock(cited_content=TextBlock(text="x"), source="s", title="t", additional_location_info={})
POINT = CachePoint(cache_control=CacheControl(type="ephemeral"))


def asked(*messages: ChatMessage, known: list[Any] | None = None, namespace: str | None = None) -> Request:
    registry = Registry()
    registry.register(known or [])
    return message_request(messages, KnownTexts(registry, namespace, split=True))


def user(*blocks: Any, **extra: Any) -> ChatMessage:
    read = [TextBlock(text=block) if isinstance(block, str) else block for block in blocks]
    return ChatMessage(role=MessageRole.USER, blocks=read, additional_kwargs=extra)


def test_blocks_are_segments_as_on_every_surface() -> None:
    assert bodies(asked(user(*PAGES, "When?")).prompt) == PAGES
    assert bodies(asked(user(PAGES[0])).prompt) == []
    system = ChatMessage(role="system", blocks=[TextBlock(text="Be brief."), TextBlock(text=PAGES[0])])
    assert bodies(asked(system, user("When?")).prompt) == [PAGES[0]]
    tool = {"tool_call_id": "c1", "name": "look"}
    one = ChatMessage(role="tool", content=PAGES[0], additional_kwargs=tool)
    two = ChatMessage(role="tool", blocks=[TextBlock(text=page) for page in PAGES], additional_kwargs=tool)
    assert bodies(asked(one).prompt) == [] and bodies(asked(two).prompt) == PAGES
    assert split_turns(asked(one).prompt)[0].fields == {"role": "tool", **tool}


def test_roles_as_templates_name_them() -> None:
    for role, name in (("chatbot", "assistant"), ("model", "assistant"), ("developer", "developer")):
        assert said(asked(ChatMessage(role=role, content="x")).prompt) == [(name, "x")]


def test_hints_for_a_message_and_for_its_blocks() -> None:
    whole = user(PAGES[0], hypic={"kind": "memory", "name": "notes.md"})
    assert segments(asked(whole).prompt) == [Segment(PAGES[0], "memory", name="notes.md")]
    message = segment_message([Segment(PAGES[0], name="p#1", source="p.md"), Segment("Live.", cache=False)], "When?")
    assert segments(asked(message).prompt) == [Segment(PAGES[0], name="p#1", source="p.md")]
    assert said(asked(message).prompt) == [("user", f"{PAGES[0]}\n\nLive.\n\nWhen?")]
    named = user("Only.", hypic={"name": "n"})
    assert bodies(asked(named).prompt) == []
    # A block more than there are hints for: they are left alone, the text is not.
    message.blocks.insert(0, TextBlock(text=PAGES[1]))
    assert bodies(asked(message).prompt) == [PAGES[1], PAGES[0], "Live."]


def test_hints_survive_a_round_trip() -> None:
    message = segment_message([Segment(PAGES[0], "skill", name="s")], "When?")
    again = ChatMessage.model_validate_json(message.model_dump_json())
    assert segments(asked(again).prompt) == segments(asked(message).prompt) == [Segment(PAGES[0], "skill", name="s")]


def test_cache_points_end_segments() -> None:
    assert bodies(asked(user(PAGES[0], POINT)).prompt) == [PAGES[0]]
    assert bodies(asked(user(PAGES[0], POINT, "When?")).prompt) == [PAGES[0]]
    assert bodies(asked(user(POINT, "When?")).prompt) == []
    head = ChatMessage(role="system", blocks=[TextBlock(text=PAGES[0]), POINT])
    assert bodies(asked(head, user("When?")).prompt) == []  # exact there, and shared by its snapshot
    answer = ChatMessage(role="assistant", blocks=[TextBlock(text=PAGES[0]), POINT])
    assert bodies(asked(user("When?"), answer, user("And?")).prompt) == []


def test_citable_blocks_are_documents() -> None:
    block = CitableBlock(title="Mills", source="mills.md", content=[TextBlock(text=PAGES[0])])
    prompt = asked(user(block, "When?")).prompt
    assert segments(prompt) == [Segment(PAGES[0], name="Mills", source="mills.md")]
    with pytest.raises(PromptError, match="block 0 of message 0 has the type 'citable with image'"):
        asked(user(CitableBlock(title="x", source="y", content=[ImageBlock(image=b"GIF8")]), "When?"))


def test_what_is_not_text_is_named() -> None:
    for block, name in (
        (ImageBlock(image=b"GIF8"), "image"),
        (AudioBlock(audio=b"RIFF"), "audio"),
        (VideoBlock(video=b"0000"), "video"),
        (ThinkingBlock(content="Hm."), "thinking"),
        (ToolCallBlock(tool_name="f"), "tool_call"),
        (CITED, "citation"),
    ):
        with pytest.raises(PromptError, match=f"block 1 of message 1 has the type '{name}'"):
            asked(user("Hello."), user("See:", block))


def test_an_assistants_calls_and_thoughts_are_fields() -> None:
    call = ToolCallBlock(tool_call_id="c1", tool_name="look", tool_kwargs='{"what": "mill"}')
    message = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="Hm."), TextBlock(text="Let me see."), call])
    (turn,) = split_turns(asked(message).prompt)
    function = {"name": "look", "arguments": {"what": "mill"}}
    assert turn.fields["tool_calls"] == [{"type": "function", "id": "c1", "function": function}]
    assert turn.fields["reasoning_content"] == "Hm." and turn.generated_text == "Let me see."
    old = ChatMessage(role="assistant", additional_kwargs={"tool_calls": [{"id": "c1", "function": function}]})
    assert split_turns(asked(old).prompt)[0].fields["tool_calls"] == turn.fields["tool_calls"]
    for bad in ([{"id": "x"}], ["f()"], [{"function": {"name": "f", "arguments": "[1"}}]):
        with pytest.raises(PromptError, match="message 0"):
            asked(ChatMessage(role="assistant", additional_kwargs={"tool_calls": bad}))


def test_flat_text_is_cut_without_loss() -> None:
    text = f"Read:\n{PAGES[0]}\n\n{PAGES[1]}\nWhen?"
    request = asked(user(text), known=PAGES)
    assert bodies(request.prompt) == PAGES and said(request.prompt) == [("user", text)]
    assert [found.start for found in request.found] == [6, 6 + len(PAGES[0]) + 2]
    close = asked(user(f"({PAGES[0]})When?"), known=PAGES)
    assert bodies(close.prompt) == PAGES[:1] and said(close.prompt) == [("user", f"({PAGES[0]})When?")]
    # The model's own words are never cut.
    assert not asked(user("x"), ChatMessage(role="assistant", content=PAGES[0]), known=PAGES).found


def test_marked_segments_are_learned_and_namespaces_kept_apart() -> None:
    registry = Registry()
    message = segment_message([Segment(PAGES[0], namespace="theirs")], "When?")
    prompt = message_request([message], KnownTexts(registry, "mine", split=True)).prompt
    assert [s.namespace for s in segments(prompt)] == ["mine"]
    assert registry.find(PAGES[0], "mine") and not registry.find(PAGES[0], "theirs")


def test_hints_that_do_not_exist_are_refused() -> None:
    expected = r"'namespce' \(did you mean 'namespace'\?\); known are kind, "
    for hints in ({"namespce": "alice"}, {"blocks": [{"namespce": "alice"}]}):
        with pytest.raises(PromptError, match=expected):
            asked(user(PAGES[0], hypic=hints))


def test_hints_must_be_a_mapping() -> None:
    with pytest.raises(PromptError, match="message 0 are 'yes'"):
        asked(user("x", hypic="yes"))
