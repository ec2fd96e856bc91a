"""A user's prompt template in which every retrieved chunk stays a segment of its own.

The template is formatted with an opaque word in every chunk's place and cut at these words: a chunk's text never runs
through the template, and the text that the model sees is what the template would have given with the chunks joined.
Rank labels ("Source 3:") are live text before their chunk, so that a chunk is the same segment at every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.prompts import BasePromptTemplate
from pydantic import Field, SerializeAsAny

from hypic.errors import PromptError
from hypic.integrations._common import LIVE, Block, block_of, by_place
from hypic.integrations.llamaindex.messages import marked_message, role_of
from hypic.types import Prompt, Segment

_GLUE = Prompt().glue


@dataclass(frozen=True)
class Chunk:
    """A retrieved text: a label that depends on its rank, and what is the same at every rank."""

    segment: Segment
    label: str = ""

    @property
    def text(self) -> str:
        return self.label + self.segment.text

    def to_blocks(self) -> list[Block]:
        return [*([Block(self.label, LIVE)] if self.label else []), block_of(self.segment)]


class SegmentTemplate(BasePromptTemplate):
    """``inner`` with ``chunks`` in the place of ``context_str``, behind the messages of ``prefix``.

    ``is_cut=False`` puts the chunks in as joined text, for models that know nothing of segments.
    """

    inner: SerializeAsAny[BasePromptTemplate]
    chunks: Sequence[Chunk] = ()
    prefix: Sequence[ChatMessage] = ()
    is_cut: bool = True
    word: str = Field(default_factory=lambda: f"hypic{uuid4().hex}n")

    @classmethod
    def of(
        cls, inner: BasePromptTemplate, chunks: Sequence[Chunk], prefix: Sequence[ChatMessage], is_cut: bool
    ) -> Self:
        return cls(
            inner=inner,
            chunks=chunks,
            prefix=prefix,
            is_cut=is_cut,
            metadata=inner.metadata,
            template_vars=inner.template_vars,
            kwargs=inner.kwargs,
            output_parser=inner.output_parser,
        )

    @property
    def context(self) -> str:
        """The chunks as one text."""
        return _GLUE.join(chunk.text for chunk in self.chunks)

    def partial_format(self, **kwargs: Any) -> Self:
        return self.model_copy(update={"inner": self.inner.partial_format(**kwargs)})

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        return self.inner.format(llm=llm, **{**kwargs, "context_str": self.context})

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """The messages with one block per chunk.

        Raises:
            PromptError: the template changed or dropped a chunk's place.
        """
        marks = _GLUE.join(f"{self.word}{n}x" for n in range(len(self.chunks)))
        context = marks if self.is_cut else self.context
        messages = self.inner.format_messages(llm=llm, **{**kwargs, "context_str": context})
        if self.output_parser is not None and self.output_parser is not self.inner.output_parser:
            # Structured output gives the template a parser of its own, which writes into the last block's text.
            messages = self.output_parser.format_messages(messages)
        if not self.is_cut:
            return [*self.prefix, *messages]
        seen: set[int] = set()
        cut = [self._message(message, len(self.prefix) + n, seen) for n, message in enumerate(messages)]
        if len(seen) < len(self.chunks):
            raise PromptError("the prompt template changed or dropped the chunks' text; use {context_str} as it is.")
        return [*self.prefix, *cut]

    def get_template(self, llm: BaseLLM | None = None) -> str:
        return self.inner.get_template(llm=llm)

    def _message(self, message: ChatMessage, index: int, seen: set[int]) -> ChatMessage:
        """The message, cut if chunks stand in it; its blocks then stand directly behind each other."""
        if not any(isinstance(block, TextBlock) and self.word in block.text for block in message.blocks):
            return message
        parts: list[Block] = []
        for n, block in enumerate(message.blocks):
            if not isinstance(block, TextBlock):
                raise PromptError(f"the prompt template has a block of type {block.block_type!r}; take it out.")
            parts += [Block(_GLUE, LIVE)] if n else []
            place = by_place(role_of(message), index, n, len(message.blocks), listed=True)
            parts += self._cut(block.text, seen) if self.word in block.text else [Block(block.text, place)]
        # Parsers of structured output write behind the last block: that is never a chunk.
        tail = [] if parts[-1].hints.get("cache") is False else [Block("", LIVE)]
        extra = {key: value for key, value in message.additional_kwargs.items() if key != "hypic"}
        return marked_message(message.role, [*parts, *tail], extra, glue="")

    def _cut(self, text: str, seen: set[int]) -> list[Block]:
        """``text`` cut at the words; every second part of such a split is a word's number."""
        blocks: list[Block] = []
        for n, part in enumerate(re.split(rf"{self.word}(\d+)x", text)):
            if n % 2:
                seen.add(int(part))
                blocks += self.chunks[int(part)].to_blocks()
            elif part:
                blocks.append(Block(part, LIVE))
        return blocks
