"""Retrieved documents as segments: a placeholder for chat prompts and a drop-in documents chain.

The chain works with any prompt that has a variable for the documents: the prompt is formatted with
an opaque mark in every document's place and cut at the marks, so a document's text never runs
through a template and nothing else is changed by a character. Not here: retrieval.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, format_document
from langchain_core.prompts.message import BaseMessagePromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda

from hypic.errors import ConfigError, PromptError
from hypic.integrations._common import Block, block_of
from hypic.integrations.langchain.blocks import blocks_of, segments_from_documents
from hypic.integrations.langchain.messages import joined_content
from hypic.integrations.langchain.prompts import SegmentPromptValue
from hypic.types import Prompt, Segment

_LIVE = {"cache": False}
_GLUE = Prompt().glue
_PAGE_ONLY = PromptTemplate.from_template("{page_content}")


class DocumentsPlaceholder(BaseMessagePromptTemplate):
    """In a chat prompt: one user message with one segment per document, then, if given, a line of live text.

    ``DocumentsPlaceholder("context", tail="{question}")`` puts documents and question in one user
    message, which is what most chat templates are trained on.
    """

    variable_name: str = "context"
    tail: str | None = None

    def __init__(self, variable_name: str = "context", *, tail: str | None = None, **kwargs: Any) -> None:
        super().__init__(variable_name=variable_name, tail=tail, **kwargs)  # type: ignore[call-arg]  # pydantic's own

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    @property
    def input_variables(self) -> list[str]:
        return [self.variable_name, *(self._tail.input_variables if self.tail is not None else [])]

    @property
    def _tail(self) -> PromptTemplate:
        return PromptTemplate.from_template(self.tail or "")

    def format_messages(self, **kwargs: Any) -> list[BaseMessage]:
        """The message; without documents and tail, none.

        Raises:
            PromptError: the variable does not hold documents.
        """
        documents = _checked(self.variable_name, kwargs[self.variable_name])
        blocks = [block_of(segment) for segment in segments_from_documents(documents)]
        if self.tail is not None:
            blocks.append(Block(self._tail.format(**{k: kwargs[k] for k in self._tail.input_variables}), _LIVE))
        return [HumanMessage(content=[block.to_content() for block in blocks])] if blocks else []

    def pretty_repr(self, html: bool = False) -> str:
        return "Documents Placeholder\n\n{" + self.variable_name + "}" + (f"\n\n{self.tail}" if self.tail else "")


def create_segment_documents_chain(
    llm: Runnable[LanguageModelInput, Any],
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """A chain that answers from documents, each of them one segment of the prompt.

    Takes the arguments of LangChain's ``create_stuff_documents_chain`` and sends the same text, with
    the documents' borders and labels (``id``, ``metadata["source"]``) kept. ``llm`` is ``ChatHypic``,
    ``HypicLLM`` or any other model or chain of them. What ``document_prompt`` puts around
    ``{page_content}`` is live text. A chat prompt may hold a ``DocumentsPlaceholder`` instead.

    Raises:
        ConfigError: ``prompt`` has no variable ``document_variable_name``, or ``document_prompt`` no ``page_content``.
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigError(f"the prompt has no variable {document_variable_name!r}; it has {prompt.input_variables}.")
    page = _PAGE_ONLY if document_prompt is None else document_prompt
    if "page_content" not in page.input_variables:
        raise ConfigError(f"document_prompt has no variable 'page_content'; it has {page.input_variables}.")
    stuffing = _Stuffing(prompt, page, document_separator, document_variable_name)
    parser = StrOutputParser() if output_parser is None else output_parser
    formatted = RunnableLambda(stuffing.format, afunc=stuffing.aformat, name="format_documents")
    return (formatted | llm | parser).with_config(run_name="segment_documents_chain")


@dataclass(frozen=True)
class _Stuffing:
    """A prompt and how documents stand in it."""

    prompt: BasePromptTemplate[Any]
    page: BasePromptTemplate[str]
    separator: str
    variable: str

    def format(self, inputs: dict[str, Any]) -> PromptValue:
        documents = _checked(self.variable, inputs.get(self.variable))
        if self._has_placeholder():
            return self.prompt.invoke(inputs)
        marks, text = self._marked(documents)
        return marks.segmented(self.prompt.invoke({**inputs, self.variable: text}))

    async def aformat(self, inputs: dict[str, Any]) -> PromptValue:
        documents = _checked(self.variable, inputs.get(self.variable))
        if self._has_placeholder():
            return await self.prompt.ainvoke(inputs)
        marks, text = self._marked(documents)
        return marks.segmented(await self.prompt.ainvoke({**inputs, self.variable: text}))

    def _has_placeholder(self) -> bool:
        messages = self.prompt.messages if isinstance(self.prompt, ChatPromptTemplate) else []
        return any(isinstance(m, DocumentsPlaceholder) and m.variable_name == self.variable for m in messages)

    def _marked(self, documents: Sequence[Document]) -> tuple[_Marks, str]:
        marks = _Marks(f"hypic{uuid4().hex}n", tuple(segments_from_documents(documents)))
        pages = [
            format_document(Document(page_content=marks.mark(n), metadata=document.metadata), self.page)
            for n, document in enumerate(documents)
        ]
        return marks, self.separator.join(pages)


@dataclass(frozen=True)
class _Marks:
    """Opaque words that stand for documents in a formatted prompt."""

    word: str
    segments: tuple[Segment, ...]

    def mark(self, n: int) -> str:
        return f"{self.word}{n}x"

    def segmented(self, value: PromptValue) -> PromptValue:
        """The formatted prompt with the documents in their places.

        Raises:
            PromptError: the template changed or dropped a document's place.
        """
        seen: set[int] = set()
        result: PromptValue
        if isinstance(value, ChatPromptValue):
            result = ChatPromptValue(messages=[self._message(message, seen) for message in value.messages])
        else:
            result = self._flat(value.to_string(), seen)
        if len(seen) < len(self.segments):
            raise PromptError("the prompt template changed or dropped the documents' text; use the variable as it is.")
        return result

    def _flat(self, text: str, seen: set[int]) -> PromptValue:
        pieces = self._cut(text, seen)
        tail = pieces.pop() if pieces and isinstance(pieces[-1], str) else ""
        segments = [Segment(p, "turn", cache=False) if isinstance(p, str) else p for p in pieces]
        return SegmentPromptValue(segments=segments, tail=str(tail), glue="")

    def _message(self, message: BaseMessage, seen: set[int]) -> BaseMessage:
        if self.word not in str(message.content):
            return message
        parts: list[Block] = []
        for n, block in enumerate(blocks_of(message)):
            parts += [Block(_GLUE, _LIVE)] if n else []
            marked = self.word in block.text
            pieces = self._cut(block.text, seen)
            parts += [Block(p, _LIVE) if isinstance(p, str) else block_of(p) for p in pieces] if marked else [block]
        update = joined_content(parts)
        marks = {**message.additional_kwargs, **update["additional_kwargs"]}
        return message.model_copy(update={**update, "additional_kwargs": marks})

    def _cut(self, text: str, seen: set[int]) -> list[Segment | str]:
        """``text`` cut at the marks; every second part of such a split is a mark's number."""
        pieces: list[Segment | str] = []
        for n, part in enumerate(re.split(rf"{self.word}(\d+)x", text)):
            if n % 2:
                seen.add(int(part))
                pieces.append(self.segments[int(part)])
            elif part:
                pieces.append(part)
        return pieces


def _checked(variable: str, value: object) -> list[Document]:
    if not isinstance(value, (list, tuple)):
        kind = type(value).__name__
        raise PromptError(f"{variable!r} is {kind}, not a list of Document; pass what the retriever returned.")
    for item in value:
        if not isinstance(item, Document):
            kind = type(item).__name__
            raise PromptError(f"{variable!r} holds a {kind}; pass a list of Document: Document(text) each.")
    return list(value)
