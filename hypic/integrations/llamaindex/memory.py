"""``HypicMemoryBlock``: long-lived texts of a LlamaIndex ``Memory`` as messages of their own, one segment each.

Blocks that return text are rendered by ``Memory`` into one block of the system message; messages are passed on as they
are. A text that has not changed is then reused, whatever stands before it. Not here: what the conversation forgets is
not kept by this block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer
from pydantic import Field, field_validator

from hypic.integrations._common import Block, block_of
from hypic.integrations.agents import SegmentSource
from hypic.integrations.llamaindex.messages import marked_message
from hypic.types import Segment


class HypicMemoryBlock(BaseMemoryBlock[list[ChatMessage]]):
    """One message per text, in order: those of ``texts``, then those that ``source`` has now.

    A plain string becomes a segment of kind ``memory``; live text (``cache=False``) stands in the message of the text
    behind it. ``source`` is a ``SegmentSource`` of ``hypic.integrations.agents``, such as ``MemoryFiles``. ``role`` is
    that of the messages; many chat templates take a system message at the head only.
    """

    name: str = Field(default="memory")
    texts: list[Any] = Field(default_factory=list)
    source: Any = Field(default=None, exclude=True, repr=False)
    role: MessageRole = MessageRole.USER
    accept_short_term_memory: bool = False

    @field_validator("texts", mode="before")
    @classmethod
    def _read_texts(cls, value: Any) -> list[Segment]:
        each = [value] if isinstance(value, (str, Segment)) else value
        return [text if isinstance(text, Segment) else Segment(text, kind="memory") for text in each]

    @field_validator("source")
    @classmethod
    def _check_source(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, SegmentSource):
            raise ValueError(f"source is a {type(value).__name__}; it needs the methods poll and segments.")
        return value

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> list[ChatMessage]:
        segments = [*self.texts, *(await asyncio.to_thread(self._current))]
        return [marked_message(self.role, blocks) for blocks in _grouped(segments)]

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Nothing: the texts are changed where they come from."""

    async def atruncate(self, content: list[ChatMessage], tokens_to_truncate: int) -> list[ChatMessage] | None:
        """Leaves out whole messages, last first, until that many tokens are gone."""
        count, kept = get_tokenizer(), list(content)
        while kept and tokens_to_truncate > 0:
            tokens_to_truncate -= len(count(kept.pop().content or ""))
        return kept or None

    def _current(self) -> Sequence[Segment]:
        if self.source is None:
            return ()
        self.source.poll()
        segments: Sequence[Segment] = self.source.segments()
        return segments


def _grouped(segments: Iterable[Segment]) -> Iterator[list[Block]]:
    """The blocks of one message each: a text, and the live text before it."""
    group: list[Block] = []
    for segment in segments:
        if segment.text.strip():
            group.append(block_of(segment))
        if group and segment.cache is not False:
            yield group
            group = []
    if group:
        yield group
