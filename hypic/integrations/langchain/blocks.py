"""Text content blocks: the one carrier of segments through LangChain.

A segment is one block, ``{"type": "text", "text": ..., "extras": {"hypic": {...}}}``; the border of
the block is the border of the segment, and the hints under ``extras.hypic`` (``kind``, ``name``,
``source``, ``cache``, ``namespace``, ``ttl_s``, ``seam``) are optional. They never change text or role.
Hints may stand beside the text too, as the engine takes them; one that is unknown is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, BaseMessage

from hypic.errors import unknown_hint
from hypic.integrations._common import HINTS, Block, ContentBlock, block_of
from hypic.types import Kind, Segment

# Parts of an answer that stand elsewhere in the message, or nowhere.
_BESIDE_TEXT = ("tool_call", "tool_use", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking")


def segment(
    text: str,
    kind: Kind = "document",
    *,
    name: str | None = None,
    source: str | None = None,
    namespace: str | None = None,
    cache: bool | None = None,
) -> ContentBlock:
    """A content block that is one segment (or, with ``cache=False``, live text at that place).

    Raises:
        ConfigError: ``kind`` is unknown.
        PromptError: ``text`` is not a ``str``.
    """
    return block_of(Segment(text, kind, name, source, namespace, cache)).to_content()


def segments_from_documents(documents: Iterable[Document], *, kind: Kind = "document") -> list[Segment]:
    """One segment per document: its exact text; name and source from ``id`` and ``metadata`` (``id``, ``source``)."""
    return [
        Segment(d.page_content, kind, _label(d.id, d.metadata.get("id")), _label(d.metadata.get("source")))
        for d in documents
    ]


def blocks_of(message: BaseMessage) -> list[Block]:
    """The text blocks of a message, unmerged.

    Raises:
        ModelInvalidRequestError: a block is not text, or has a hint that is unknown.
    """
    content = message.content
    if isinstance(content, str):
        return [Block(content, _message_hints(message))]
    return [block for item in content for block in _read(item, message)]


def _read(item: str | Mapping[str, Any], message: BaseMessage) -> list[Block]:
    if isinstance(item, str):
        return [Block(item)]
    kind = item.get("type")
    if kind == "text" and isinstance(item.get("text"), str):
        return [Block(item["text"], _hints(item))]
    if kind == "text-plain" and isinstance(item.get("text"), str):
        # Title and context are the block's labels: live text before it.
        labels = [str(item[key]) for key in ("title", "context") if item.get(key)]
        return [*(Block(label, {"cache": False}) for label in labels), Block(item["text"], _hints(item))]
    if isinstance(message, AIMessage) and kind in _BESIDE_TEXT:
        return []
    raise ModelInvalidRequestError(f"a content block has the type {kind!r}; the model reads text only, take it out.")


def _hints(item: Mapping[str, Any]) -> dict[str, Any]:
    extras = item.get("extras")
    hints = item.get("hypic", extras.get("hypic") if isinstance(extras, Mapping) else None)
    if hints is None:
        return {}
    if not isinstance(hints, Mapping):
        raise ModelInvalidRequestError(f"the hypic hint is {hints!r:.80}; pass a mapping with {', '.join(HINTS)}.")
    wrong = unknown_hint(hints, HINTS, "id")
    if wrong is not None:
        raise ModelInvalidRequestError(wrong)
    named = {"name": hints.get("id"), **hints}
    return {key: named[key] for key in HINTS if named.get(key) is not None}


def _message_hints(message: BaseMessage) -> dict[str, Any]:
    """A message that an agent framework marks as a pinned skill is one segment."""
    skill = message.additional_kwargs.get("skill")
    if message.additional_kwargs.get("lc_source") != "pinned_skill" or not isinstance(skill, Mapping):
        return {}
    return {k: v for k, v in {"kind": "skill", "name": skill.get("name"), "source": skill.get("path")}.items() if v}


def _label(*candidates: object) -> str | None:
    return next((str(value) for value in candidates if value is not None), None)
