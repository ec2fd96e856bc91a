"""Retrieval in LlamaIndex: an adapter for any index with ``search``, and a handler that learns any retriever's nodes.

Nodes come back with a stable id, the passage's exact text, and no metadata in what the model reads: scores and ranks
change from query to query and would make every text a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from llama_index_instrumentation import get_dispatcher
from pydantic import Field, field_validator

from hypic.errors import ConfigError
from hypic.integrations._common import registry_of
from hypic.integrations._search import Hit, Passage, SearchIndex
from hypic.registry import Registry
from hypic.types import Segment

_SOURCES = ("source", "file_path", "file_name", "url")
# Where sentence-window retrieval keeps the text that later takes the node's place.
_WINDOW = "window"


def segments_from_nodes(nodes: Iterable[NodeWithScore | BaseNode]) -> list[Segment]:
    """One segment per node: its text as a model reads it, metadata included; name and source from id and metadata."""
    return [segment_of(node.node if isinstance(node, NodeWithScore) else node) for node in nodes]


def segment_of(node: BaseNode, text: str | None = None) -> Segment:
    """A node as a segment; ``text`` in the place of its own."""
    parent = None if node.source_node is None else node.source_node.node_id
    source = next((str(node.metadata[key]) for key in _SOURCES if node.metadata.get(key)), parent)
    read = node.get_content(metadata_mode=MetadataMode.LLM) if text is None else text
    return Segment(read, name=node.node_id, source=source)


class HypicRetriever(BaseRetriever):
    """Passages of an index as nodes, best first.

    ``registry`` (``llm.registry``) is told of every passage, to know it in flat text.

    Raises:
        ConfigError: ``index`` cannot search, or ``registry`` is none.
    """

    def __init__(
        self,
        index: SearchIndex,
        k: int = 4,
        *,
        registry: Registry | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not callable(getattr(index, "search", None)):
            raise ConfigError(f"index is a {type(index).__name__}; it needs a method search(query, k).")
        is_count = isinstance(k, Integral) and not isinstance(k, bool) and k >= 1
        if not is_count:
            raise ConfigError(f"k is {k!r}; it must be a whole number of nodes, 1 or more.")
        if not isinstance(registry, (Registry, type(None))):
            raise ConfigError(f"registry is a {type(registry).__name__}; pass llm.registry or nothing.")
        super().__init__(callback_manager=callback_manager)
        self.index, self.k, self.registry = index, k, registry

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits: Sequence[Hit] = self.index.search(query_bundle.query_str, self.k)
        nodes = [NodeWithScore(node=as_node(hit.passage), score=float(hit.score)) for hit in hits]
        if self.registry is not None:
            self.registry.register(segments_from_nodes(nodes))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def as_node(passage: Passage) -> TextNode:
    """A passage as a node; what a model reads is the passage's text, to the character."""
    if passage.source is None:
        return TextNode(id_=passage.id, text=passage.text)
    return TextNode(
        id_=passage.id,
        text=passage.text,
        metadata={"source": passage.source},
        excluded_llm_metadata_keys=["source"],
        excluded_embed_metadata_keys=["source"],
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=passage.source)},
    )


class RegisterNodes(BaseEventHandler):
    """Makes what any retriever returns known to an engine, for synthesizers that join nodes into one text.

    ``RegisterNodes(llm=llm).attach()`` listens to every retriever of this process; it may be added to one dispatcher
    instead. ``llm`` is a ``HypicLLM``; its engine starts with the first retrieval. ``registry=`` takes a
    ``hypic.registry.Registry`` instead.
    """

    llm: Any = Field(default=None, repr=False)
    registry: Any = Field(default=None, repr=False)
    namespace: str | None = None

    @field_validator("registry")
    @classmethod
    def _check_registry(cls, value: Any) -> Any:
        if not isinstance(value, (Registry, type(None))):
            raise ValueError(f"registry is a {type(value).__name__}; pass llm=, llm.registry or nothing.")
        return value

    @classmethod
    def class_name(cls) -> str:
        return "RegisterNodes"

    def attach(self) -> Self:
        """Listens from now on, until ``detach``."""
        get_dispatcher().add_event_handler(self)
        return self

    def detach(self) -> None:
        """Listens no more."""
        root = get_dispatcher()
        root.event_handlers = [handler for handler in root.event_handlers if handler is not self]

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if not isinstance(event, RetrievalEndEvent):
            return
        registry = self.registry if self.llm is None else registry_of(self.llm.get_engine())
        namespace = self.namespace or getattr(self.llm, "namespace", None)
        if registry is not None:
            registry.register([text for node in event.nodes for text in _texts(node.node)], namespace=namespace)


def _texts(node: BaseNode) -> Iterator[Segment]:
    """What of a node a prompt may come to hold: with metadata, without, and the window around its sentence."""
    window = node.metadata.get(_WINDOW)
    if isinstance(window, str):
        yield segment_of(node, window)
    yield segment_of(node, node.get_content(metadata_mode=MetadataMode.NONE))
    yield segment_of(node)
