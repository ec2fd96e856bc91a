"""Nodes and parts of LlamaIndex that are fixed in advance, and a watch on what an engine is asked."""

import zlib
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from hypic.integrations.llamaindex import HypicLLM

PAGES = [f"Passage {n}: the company was founded in {1900 + n} by Ada Perkins of the Elbe hills." for n in range(4)]
STORY = "".join(
    f"The {name} mill stands on the river Lenne and was built by {who}. It spun wool for {n} generations of workers. "
    f"In {1900 + n} the owners sold the {name} house to the town for a small sum. "
    for n, (name, who) in enumerate([("Alpha", "Ada Perkins"), ("Beta", "Tom Okafor"), ("Gamma", "Ida Lorenz")], 3)
)


class WordEmbedding(BaseEmbedding):
    """Texts that share words are near each other; no model."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.01] * 64
        for word in text.lower().split():
            vector[zlib.crc32(word.strip(".,?:").encode()) % 64] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Turned(BaseNodePostprocessor):
    """A reranker that likes what the retriever liked least."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [NodeWithScore(node=node.node, score=float(n)) for n, node in enumerate(nodes)][::-1]


ORDERS: list[list[BaseNodePostprocessor]] = [[], [Turned()]]


class Fixed(BaseRetriever):
    """Gives the nodes it was made with, in the order that the query names: a retriever that is not ours."""

    def __init__(self, nodes: list[TextNode]) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self.nodes[::-1] if "back" in query_bundle.query_str else self.nodes
        return [NodeWithScore(node=node, score=1.0 - n / 10) for n, node in enumerate(nodes)]


class Watch:
    """What the engine reported, call by call."""

    def __init__(self, llm: HypicLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: list[Any] = []
        engine = llm.get_engine()
        stream, astream = engine.stream, engine.astream

        def watched(*args: Any, **options: Any) -> Any:
            for piece in stream(*args, **options):
                self.reports += [piece.report] if piece.report else []
                yield piece

        async def awatched(*args: Any, **options: Any) -> Any:
            async for piece in astream(*args, **options):
                self.reports += [piece.report] if piece.report else []
                yield piece

        monkeypatch.setattr(engine, "stream", watched)
        monkeypatch.setattr(engine, "astream", awatched)

    @property
    def outcomes(self) -> list[str]:
        return [segment.outcome for segment in self.reports[-1].segments]


def nodes(texts: list[str] = PAGES) -> list[TextNode]:
    return [TextNode(text=text, id_=f"n{n}") for n, text in enumerate(texts)]
