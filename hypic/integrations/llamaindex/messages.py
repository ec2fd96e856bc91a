"""LlamaIndex messages in the engine's form: one text block is one segment or live text of its own.

``ChatMessage.content`` joins blocks and is never used. Hints stand in ``additional_kwargs["hypic"]``: ``kind``,
``cache``, ``name``, ``source`` and ``namespace`` for the whole message, ``blocks`` as a list of such hints parallel to
the message's blocks, ``glue`` for the live text between blocks. They never change text or role. A ``CachePoint`` makes
the block before it a segment, a ``CitableBlock`` is a document with its title as live text before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from hypic.errors import PromptError, unknown_hint
from hypic.integrations._common import HINTS, LIVE, Block, Found, KnownTexts, Request, block_of, by_place
from hypic.types import Message, Segment

_ROLES = {MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}


def segment_message(
    segments: Sequence[Segment], tail: str = "", *, role: MessageRole = MessageRole.USER
) -> ChatMessage:
    """A message with one block per segment, then live text if there is any."""
    blocks = [block_of(segment) for segment in segments]
    return marked_message(role, [*blocks, Block(tail, LIVE)] if tail else blocks)


def marked_message(
    role: MessageRole, blocks: Sequence[Block], extra: Mapping[str, Any] | None = None, glue: str | None = None
) -> ChatMessage:
    """A message whose hints say what each block is."""
    hints: dict[str, Any] = {"blocks": [dict(block.hints) for block in blocks]}
    if glue is not None:
        hints["glue"] = glue
    texts = [TextBlock(text=block.text) for block in blocks]
    return ChatMessage(role=role, blocks=texts, additional_kwargs={**(extra or {}), "hypic": hints})


def message_request(messages: Sequence[ChatMessage], known: KnownTexts) -> Request:
    """Messages in the engine's form, flat text cut at known texts.

    Raises:
        PromptError: there is no message, a block is not text, or hints are no mapping or unknown.
    """
    if not messages:
        raise PromptError("the list of messages is empty; pass at least one message.")
    read = [(m, [known.owned_block(b) for b in blocks_of(m, index)]) for index, m in enumerate(messages)]
    for _, blocks in read:
        known.learn([block.to_segment() for block in blocks if block.is_marked])
    found: list[Found] = []
    turns = [_turn(message, index, blocks, known, found) for index, (message, blocks) in enumerate(read)]
    return Request(turns, tuple(found))


def role_of(message: ChatMessage) -> str:
    """The role as chat templates name it."""
    return _ROLES.get(message.role, message.role.value)


def blocks_of(message: ChatMessage, index: int = 0) -> list[Block]:
    """The text blocks of a message, unmerged; ``index`` is its place in the prompt.

    Raises:
        PromptError: a block is not text; it is named.
    """
    outer, inner = _hints(message, index)
    blocks: list[Block] = []
    for n, block in enumerate(message.blocks):
        hints = {**outer, **(inner[n] if n < len(inner) else {})}
        if isinstance(block, CachePoint):
            _end_segment(blocks, message, index)
        elif isinstance(block, TextBlock):
            blocks.append(Block(block.text, hints))
        elif isinstance(block, CitableBlock):
            blocks += _citable(block, hints, index, n)
        elif role_of(message) != "assistant" or not isinstance(block, (ThinkingBlock, ToolCallBlock, CitationBlock)):
            raise _not_text(block.block_type, index, n)
    return blocks


def _hints(message: ChatMessage, index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Hints for the whole message, and for each of its blocks; the latter only where they fit the blocks."""
    hints = message.additional_kwargs.get("hypic")
    if hints is None:
        return {}, []
    if not isinstance(hints, Mapping):
        raise PromptError(f"the hypic hints of message {index} are {hints!r:.80}; pass a mapping.")
    inner = hints.get("blocks")
    # Whoever added or took blocks out did not know of the hints: they are only hints.
    fits = isinstance(inner, Sequence) and len(inner) == len(message.blocks)
    outer = _known(hints, "blocks", "glue")
    return outer, [_known(each) for each in inner or ()] if fits else []


def _known(hints: object, *further: str) -> dict[str, Any]:
    wrong = unknown_hint(hints, HINTS, *further) if isinstance(hints, Mapping) else None
    if wrong is not None:
        raise PromptError(wrong)
    return {key: hints[key] for key in HINTS if hints.get(key) is not None} if isinstance(hints, Mapping) else {}


def _end_segment(blocks: list[Block], message: ChatMessage, index: int) -> None:
    """Makes the last block a segment, where that is not done better by a snapshot: at the head, and in answers."""
    at_head = index == 0 and len(blocks) == 1 and role_of(message) in ("system", "developer")
    if blocks and not blocks[-1].is_marked and not at_head and role_of(message) != "assistant":
        blocks[-1] = Block(blocks[-1].text, {**blocks[-1].hints, "cache": True})


def _citable(block: CitableBlock, hints: Mapping[str, Any], index: int, n: int) -> Iterator[Block]:
    labels = {"kind": "document", "name": block.title or None, "source": block.source or None}
    if block.title:
        yield Block(block.title, LIVE)
    for inner in block.content:
        if not isinstance(inner, TextBlock):
            raise _not_text(f"citable with {inner.block_type}", index, n)
        yield Block(inner.text, {**{k: v for k, v in labels.items() if v is not None}, **hints})


def _not_text(block_type: str, index: int, n: int) -> PromptError:
    return PromptError(
        f"block {n} of message {index} has the type {block_type!r}; the model reads text only, take it out."
    )


def _turn(message: ChatMessage, index: int, blocks: list[Block], known: KnownTexts, found: list[Found]) -> Message:
    role = role_of(message)
    listed = len(blocks) > 1
    parts = known.cut(blocks, role, index, found, listed=listed)
    cut = parts is not blocks
    turn: dict[str, Any] = {"role": role, **_fields(message, index), "content": _content(parts, role, index, cut)}
    if known.namespace is not None:
        turn["hypic"] = {"namespace": known.namespace}
    # Text that was one block has nothing between its pieces.
    glue = "" if cut and not listed else (message.additional_kwargs.get("hypic") or {}).get("glue")
    return turn if glue is None else {**turn, "glue": glue}


def _content(parts: Sequence[Block], role: str, index: int, cut: bool) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and not cut:
        only = parts[0]
        if not only.hints:
            return only.text
        # LlamaIndex has no content that is a string: a single block is one.
        place = {} if only.is_marked else by_place(role, index, 0, 1, listed=False)
        return [Block(only.text, {**only.hints, **place}).to_content()]
    return [block.to_content() for block in parts] if parts else ""


def _fields(message: ChatMessage, index: int) -> dict[str, Any]:
    """What a chat template may read beside role and content."""
    extra = message.additional_kwargs
    fields: dict[str, Any] = {key: extra[key] for key in ("name", "tool_call_id") if isinstance(extra.get(key), str)}
    if role_of(message) != "assistant":
        return fields
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if calls:
        fields["tool_calls"] = [_call(c.tool_call_id, c.tool_name, c.tool_kwargs, index) for c in calls]
    elif extra.get("tool_calls"):
        fields["tool_calls"] = [_legacy_call(call, index) for call in extra["tool_calls"]]
    thoughts = [block.content for block in message.blocks if isinstance(block, ThinkingBlock) and block.content]
    return {**fields, "reasoning_content": "\n".join(thoughts)} if thoughts else fields


def _legacy_call(call: object, index: int) -> dict[str, Any]:
    """A call as older code keeps it, in OpenAI's form."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        raise PromptError(f"message {index} has the tool call {call!r:.80}; pass it as a ToolCallBlock.")
    return _call(call.get("id"), function["name"], function.get("arguments") or {}, index)


def _call(call_id: str | None, name: str, arguments: object, index: int) -> dict[str, Any]:
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        read = None
    if not isinstance(read, Mapping):
        raise PromptError(f"the arguments of {name} in message {index} are {arguments!r:.80}; pass a mapping.")
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": dict(read)}}
