"""LangChain messages and flat strings as what the engine takes, with known texts found again.

Blocks stay unmerged and text stays exact. Unmarked flat text (not the model's own answers) is cut
at the segment texts that the engine's registry knows; where it was cut is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from hypic.errors import unknown_hint
from hypic.integrations._common import Block, Found, KnownTexts, Request, pieces_of
from hypic.integrations.langchain.blocks import blocks_of, segments_from_documents
from hypic.types import Message, Segment

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (SystemMessage, "system"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "function"),
)


def message_request(messages: Sequence[BaseMessage], known: KnownTexts) -> Request:
    """Messages in the engine's form.

    Raises:
        ModelInvalidRequestError: a block is not text, or a message has no role that a template knows.
    """
    if not messages:
        raise ModelInvalidRequestError("the list of messages is empty; pass at least one message.")
    read = [(message, [known.owned_block(block) for block in blocks_of(message)]) for message in messages]
    for message, blocks in read:
        known.learn([block.to_segment() for block in blocks if block.is_marked])
        known.learn(_artifact(message))
    found: list[Found] = []
    turns = [_turn(message, index, blocks, known, found) for index, (message, blocks) in enumerate(read)]
    return Request(turns, tuple(found))


def joined_content(blocks: Sequence[Block]) -> dict[str, Any]:
    """Content and marks of a message whose blocks stand directly behind each other, as their text says."""
    return {"content": [b.to_content() for b in pieces_of(blocks)], "additional_kwargs": {"hypic": {"glue": ""}}}


def _turn(message: BaseMessage, index: int, blocks: list[Block], known: KnownTexts, found: list[Found]) -> Message:
    joined = _is_joined(message)
    listed = not isinstance(message.content, str)
    parts = known.cut(blocks, _role(message), index, found, listed=listed)
    cut = parts is not blocks
    turn = {"role": _role(message), **_fields(message), "content": _content(message, parts if cut else blocks, cut)}
    if known.namespace is not None:
        turn["hypic"] = {"namespace": known.namespace}
    # Text that was one string has nothing between its pieces.
    return {**turn, "glue": ""} if joined or (cut and len(blocks) == 1) else turn


def _is_joined(message: BaseMessage) -> bool:
    """Whether a message says that nothing stands between its blocks; other hints belong to blocks here."""
    hints = message.additional_kwargs.get("hypic")
    if hints is None:
        return False
    if not isinstance(hints, Mapping):
        raise ModelInvalidRequestError(f"the hypic hints of a message are {hints!r:.80}; pass a mapping with glue.")
    wrong = unknown_hint(hints, ("glue",))
    if wrong is not None:
        raise ModelInvalidRequestError(f"{wrong[:-1]}; a message's other hints stand in extras of its blocks.")
    return hints.get("glue") == ""


def _content(message: BaseMessage, blocks: Sequence[Block], cut: bool) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str) and not cut and not blocks[0].hints:
        return message.content
    return [block.to_content() for block in blocks]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise ModelInvalidRequestError(f"a {type(message).__name__} has no role for the model; take it out.")


def _fields(message: BaseMessage) -> dict[str, Any]:
    """What a chat template may read beside role and content."""
    fields: dict[str, Any] = {} if message.name is None else {"name": message.name}
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    reasoning = message.additional_kwargs.get("reasoning_content")
    return {**fields, "reasoning_content": reasoning} if isinstance(reasoning, str) else fields


def _artifact(message: BaseMessage) -> list[Segment]:
    """The documents behind a retriever tool's joined result: not prompt text, but what to look for in it."""
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    documents = artifact if isinstance(artifact, list) else []
    return segments_from_documents(d for d in documents if isinstance(d, Document))
