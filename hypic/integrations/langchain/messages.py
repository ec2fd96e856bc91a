"""LangChain messages and flat strings as what the engine takes, with known texts found again.

Blocks stay unmerged and text stays exact. Unmarked flat text (not the model's own answers) is cut
at the segment texts that the engine's registry knows; where it was cut is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

from hypic.integrations.langchain.blocks import Block, block_of, blocks_of, pieces_of, segments_from_documents
from hypic.registry import POLICY_NAME, Registry
from hypic.types import Message, Prompt, PromptLike, Segment

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (SystemMessage, "system"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "function"),
)
_LEARNED = frozenset({"document", "skill", "memory"})
_LIVE = {"cache": False}


@dataclass(frozen=True)
class Found:
    """A known text in characters ``start`` to ``end`` of a flat text: block ``block`` of message ``message``."""

    message: int
    block: int
    start: int
    end: int
    name: str | None
    source: str | None


@dataclass(frozen=True)
class Request:
    """What the engine is asked, and where flat text was cut for it."""

    prompt: PromptLike
    found: tuple[Found, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """In words for the report; nothing when nothing was cut."""
        count = f"{len(self.found)} known text{'s' if len(self.found) > 1 else ''}"
        return (f"flat prompt split at {count} (policy {POLICY_NAME})",) if self.found else ()


@dataclass(frozen=True)
class KnownTexts:
    """The registry of an engine under one namespace; without a registry, or switched off, nothing is found."""

    registry: Registry | None
    namespace: str | None
    split: bool

    def learn(self, segments: Sequence[Segment]) -> None:
        """Registers what was marked as a segment, so that it is known when it returns flat."""
        if self.registry is not None:
            self.registry.register([self.owned(s) for s in segments if s.kind in _LEARNED and s.cache is not False])

    def owned(self, segment: Segment) -> Segment:
        """The segment in this model's namespace, where it has one; otherwise in the segment's own."""
        return segment if self.namespace is None else replace(segment, namespace=self.namespace)

    def owned_block(self, block: Block) -> Block:
        """The block without a namespace of its own, where this model has one."""
        if self.namespace is None or "namespace" not in block.hints:
            return block
        return Block(block.text, {k: v for k, v in block.hints.items() if k != "namespace"})

    def pieces(self, text: str) -> list[Segment | str]:
        """``text`` cut at known texts; the pieces joined are ``text``."""
        if not self.split or self.registry is None:
            return [text] if text else []
        return self.registry.split(text, self.namespace)


def flat_request(text: str, known: KnownTexts, *, template: bool) -> Request:
    """A plain string as one user turn, cut at known texts without loss."""
    pieces = known.pieces(text)
    found = tuple(_found(pieces, 0, 0))
    if not found:
        return Request(Prompt(tail=text, template=template))
    tail = pieces.pop() if isinstance(pieces[-1], str) else ""
    # A text registered as system text is still part of this user turn here.
    segments = [
        Segment(p, cache=False) if isinstance(p, str) else replace(p, kind="document" if p.kind == "system" else p.kind)
        for p in pieces
    ]
    return Request(Prompt(segments, str(tail), glue="", template=template), found)


def owned_request(prompt: Prompt, known: KnownTexts) -> Request:
    """A prompt that says itself what its segments are: nothing is cut, everything marked is learned."""
    known.learn(list(prompt.segments))
    return Request(replace(prompt, segments=[known.owned(s) for s in prompt.segments]))


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
    hints = message.additional_kwargs.get("hypic")
    joined = isinstance(hints, Mapping) and hints.get("glue") == ""
    parts = _parts(message, index, blocks, known, found)
    cut = parts is not blocks
    turn = {"role": _role(message), **_fields(message), "content": _content(message, parts if cut else blocks, cut)}
    if known.namespace is not None:
        turn["hypic"] = {"namespace": known.namespace}
    # Text that was one string has nothing between its pieces.
    return {**turn, "glue": ""} if joined or (cut and len(blocks) == 1) else turn


def _content(message: BaseMessage, blocks: Sequence[Block], cut: bool) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str) and not cut and not blocks[0].hints:
        return message.content
    return [block.to_content() for block in blocks]


def _parts(
    message: BaseMessage, index: int, blocks: list[Block], known: KnownTexts, found: list[Found]
) -> list[Block]:
    """The blocks with unmarked ones cut; the very same list when there was nothing to cut."""
    if isinstance(message, AIMessage):
        return blocks
    parts: list[Block] = []
    cut = False
    for n, block in enumerate(blocks):
        pieces = [] if block.is_marked else known.pieces(block.text)
        pieces = pieces if len(blocks) == 1 else _spaced(pieces)
        here = list(_found(pieces, index, n))
        found += here
        cut = cut or bool(here)
        rest = block.hints if block.is_marked else {**block.hints, **_by_place(message, index, n, len(blocks))}
        parts += pieces_of([_block(p, rest) for p in pieces]) if here else [Block(block.text, rest)]
    return parts if cut else blocks


def _block(piece: Segment | str, rest: Mapping[str, Any]) -> Block:
    return Block(piece, rest) if isinstance(piece, str) else block_of(piece)


def _by_place(message: BaseMessage, index: int, n: int, num_blocks: int) -> Mapping[str, Any]:
    """What an unmarked block's place makes it, said aloud: cutting changes the number of blocks."""
    if isinstance(message, SystemMessage):
        return _LIVE if index == n == 0 else {}
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return _LIVE if isinstance(message.content, str) else {}
    return {"kind": "document"} if n < num_blocks - 1 else _LIVE


def _spaced(pieces: list[Segment | str]) -> list[Segment | str]:
    """Known texts without white space at an inner border are put back into the live text around them.

    Between several blocks the engine sets its own glue, which only white space keeps away.
    """
    kept: list[Segment | str] = []
    for n, piece in enumerate(pieces):
        before, after = (pieces[n - 1] if n else " "), (pieces[n + 1] if n + 1 < len(pieces) else " ")
        free = isinstance(before, str) and before[-1:].isspace() and isinstance(after, str) and after[:1].isspace()
        text = piece if isinstance(piece, str) else piece.text
        if not isinstance(piece, str) and free:
            kept.append(piece)
        elif kept and isinstance(kept[-1], str):
            kept[-1] += text
        else:
            kept.append(text)
    return kept


def _found(pieces: Sequence[Segment | str], message: int, block: int) -> Iterator[Found]:
    start = 0
    for piece in pieces:
        end = start + len(piece if isinstance(piece, str) else piece.text)
        if isinstance(piece, Segment):
            yield Found(message, block, start, end, piece.name, piece.source)
        start = end


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
