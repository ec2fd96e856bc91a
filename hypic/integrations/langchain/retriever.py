"""A LangChain retriever over any index with ``search``, such as the one of ``hypic_retriever``.

Documents come back with a stable ``id``, the passage's exact text, and its source as the only
metadata: scores and ranks change from query to query and would make every text a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun, Callbacks
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import StructuredTool
from pydantic import BaseModel, Field, model_validator

from hypic.integrations._common import block_of
from hypic.integrations._search import Hit, Passage
from hypic.integrations.langchain.blocks import segments_from_documents
from hypic.registry import Registry


class HypicRetriever(BaseRetriever):
    """Passages of an index as documents; ``retriever.invoke(query, k=3)`` overrides ``k`` for one call."""

    index: Any = Field(repr=False)
    """A ``SearchIndex``."""
    k: int = 4
    registry: Any = Field(default=None, repr=False)
    """A ``hypic.registry.Registry`` (``llm.registry``) that is told of every passage, to know it in flat text."""

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, values: Any) -> Any:
        if not callable(getattr(values.get("index"), "search", None)):
            raise ValueError(f"index is a {type(values.get('index')).__name__}; it needs a method search(query, k).")
        if not isinstance(values.get("registry"), (Registry, type(None))):
            raise ValueError(f"registry is a {type(values['registry']).__name__}; pass llm.registry or nothing.")
        return values

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        hits: Sequence[Hit] = self.index.search(query, self.k if k is None else k)
        documents = [as_document(hit.passage) for hit in hits]
        if self.registry is not None:
            self.registry.register(segments_from_documents(documents))
        return documents


def as_document(passage: Passage) -> Document:
    """A passage as a document; the text is the passage's, to the character."""
    return Document(id=passage.id, page_content=passage.text, metadata={"source": passage.source})


class RegisterDocuments(BaseCallbackHandler):
    """A callback that makes what any retriever returns known to an engine's registry.

    For chains that join documents into one string:
    ``chain.invoke(x, {"callbacks": [RegisterDocuments(llm.registry)]})``.
    """

    def __init__(self, registry: Registry, *, namespace: str | None = None) -> None:
        self.registry = registry
        self.namespace = namespace

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        self.registry.register(segments_from_documents(documents), namespace=self.namespace)


class _Query(BaseModel):
    query: str = Field(description="what to look for")


def create_segment_retriever_tool(
    retriever: BaseRetriever,
    name: str,
    description: str,
    *,
    response_format: Literal["content", "content_and_artifact"] = "content",
) -> StructuredTool:
    """A tool that looks up documents and returns each of them as a content block of its own: a segment.

    Takes the arguments of LangChain's ``create_retriever_tool``, which returns one joined text, but no document prompt.
    """

    def result(documents: list[Document]) -> Any:
        blocks = [block_of(segment).to_content() for segment in segments_from_documents(documents)]
        # An empty list would be shown to the model as no answer at all.
        content = blocks or "No documents were found."
        return (content, documents) if response_format == "content_and_artifact" else content

    def look_up(query: str, callbacks: Callbacks = None) -> Any:
        return result(retriever.invoke(query, config={"callbacks": callbacks}))

    async def alook_up(query: str, callbacks: Callbacks = None) -> Any:
        return result(await retriever.ainvoke(query, config={"callbacks": callbacks}))

    return StructuredTool(
        name=name,
        description=description,
        func=look_up,
        coroutine=alook_up,
        args_schema=_Query,
        response_format=response_format,
    )
