"""Prompts that keep their segments on the way to a model, string models included.

``BaseLLM`` turns every input into a ``str``. ``SegmentedStr`` is a ``str`` that still knows what it
was made of, and ``SegmentPromptValue`` is the prompt value that yields one. Any other string
operation (``+``, f-strings, ``join``) gives a plain ``str``; then known texts are found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, get_buffer_string
from langchain_core.prompt_values import PromptValue
from pydantic import ConfigDict, Field

from hypic.errors import PromptError
from hypic.integrations._common import Block, block_of
from hypic.integrations.langchain.blocks import blocks_of
from hypic.types import Prompt, Segment

_GLUE = Prompt().glue


class SegmentedStr(str):
    """The text of segments, as a ``str`` that carries them.

    Made from segments (with glue between them), from a ``Prompt``, or from messages; ``segments``
    is empty for messages, whose blocks are the segments.
    """

    prompt: Prompt | None
    messages: tuple[BaseMessage, ...]

    def __new__(cls, made_of: Prompt | Sequence[Segment] | Sequence[BaseMessage]) -> Self:
        messages = () if isinstance(made_of, Prompt) else tuple(m for m in made_of if isinstance(m, BaseMessage))
        prompt = None if messages else as_prompt(made_of)
        if prompt is None and not messages:
            raise PromptError(f"{made_of!r:.80} is no Prompt, segments or messages; wrap text as Prompt(tail=text).")
        text = get_buffer_string(messages) if prompt is None else prompt_text(prompt)
        carrier = super().__new__(cls, text)
        carrier.prompt, carrier.messages = prompt, messages
        return carrier

    @property
    def segments(self) -> tuple[Segment, ...]:
        return () if self.prompt is None else tuple(self.prompt.segments)

    def __getnewargs__(self) -> tuple[Any]:  # str's are its text
        return (self.prompt if self.messages == () else self.messages,)


class SegmentPromptValue(PromptValue):
    """Segments and live text as an input for any model: hinted blocks for chat models, ``SegmentedStr`` for others."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    segments: list[Segment] = Field(default_factory=list)
    tail: str = ""
    glue: str = _GLUE
    template: bool = True

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        return cls(segments=list(prompt.segments), tail=prompt.tail, glue=prompt.glue, template=prompt.template)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["hypic", "langchain", "prompt_values"]

    def to_prompt(self) -> Prompt:
        """The same as the engine's own type."""
        return Prompt(self.segments, self.tail, self.glue, self.template)

    def to_string(self) -> str:
        """The text without roles, with the segments on board."""
        return SegmentedStr(self.to_prompt())

    def to_messages(self) -> list[BaseMessage]:
        """A system message where there is system text, and a user message; one block per segment."""
        system = [block_of(s) for s in self.segments if s.kind == "system"]
        user = [block_of(s) for s in self.segments if s.kind != "system"]
        tail = [Block(self.tail, {"cache": False})] if self.tail else []
        return [*self._message(SystemMessage, system), *self._message(HumanMessage, [*user, *tail])]

    def _message(self, kind: type[SystemMessage] | type[HumanMessage], blocks: list[Block]) -> list[BaseMessage]:
        if not blocks:
            return []
        if self.glue not in ("", _GLUE):
            blocks = [b for block in blocks for b in (Block(self.glue, {"cache": False}), block)][1:]
        marks = {} if self.glue == _GLUE else {"hypic": {"glue": ""}}
        return [kind(content=[b.to_content() for b in blocks], additional_kwargs=marks)]


class MessagesPromptValue(PromptValue):
    """Messages for a string model, which keeps them instead of their transcript."""

    messages: list[BaseMessage]

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["hypic", "langchain", "prompt_values"]

    def to_string(self) -> str:
        return SegmentedStr(self.messages)

    def to_messages(self) -> list[BaseMessage]:
        return list(self.messages)


def as_prompt(value: object) -> Prompt | None:
    """A ``Prompt``, segments, or a string that carries them, as a ``Prompt``; ``None`` for anything else."""
    if isinstance(value, Prompt):
        return value
    if isinstance(value, SegmentedStr):
        return value.prompt
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Segment) for item in value):
        return Prompt(value)
    return None


def prompt_text(prompt: Prompt) -> str:
    """What a prompt says, without roles: pieces with glue between them, except beside a segment's own white space."""
    pieces = [*prompt.segments, Segment(prompt.tail, "turn", cache=False)]
    text = ""
    before: Segment | None = None
    for piece in pieces:
        if piece.text:
            text += ("" if before is None or _spaced(before, piece) else prompt.glue) + piece.text
            before = piece
    return text


def transcript(messages: Sequence[BaseMessage]) -> Prompt:
    """Messages for a model without a chat template: roles as words, marked blocks as segments, nothing between."""
    segments: list[Segment] = []
    for n, message in enumerate(messages):
        label = get_buffer_string([message.model_copy(update={"content": "", "tool_calls": []})])
        segments.append(Segment(("\n" if n else "") + label, "turn", cache=False))
        segments += [_unordered(block) for block in blocks_of(message)]
    if not segments:
        raise ModelInvalidRequestError("the list of messages is empty; pass at least one message.")
    return Prompt(segments, glue="", template=False)


def _spaced(before: Segment, after: Segment) -> bool:
    """Whether white space of a cached piece already stands at this border."""
    ends = before.cache is not False and before.text[-1:].isspace()
    return ends or (after.cache is not False and after.text[:1].isspace())


def _unordered(block: Block) -> Segment:
    """A block as a segment that stays in its place: system text would move to the head."""
    if not block.is_marked or block.hints.get("kind") == "system":
        return Segment(block.text, "turn", cache=False)
    return block.to_segment()
