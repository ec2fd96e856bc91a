"""Passages for a question: an edit-stable splitter, BM25, optional embeddings, one index.

    from hypic_retriever import Index, read_text

    index = Index()
    index.add_documents({"handbook.md": read_text("handbook.md")})
    for hit in index.search("How long does a refund take?", k=4):
        print(hit.score, hit.passage.id, hit.passage.heading, hit.passage.text)

    index.update_document("handbook.md", read_text("handbook.md"))   # touches what changed
    index.save("handbook.index")
    index = Index.load("handbook.index")

``Index(MiniLM())`` ranks by meaning as well. The package stands alone: it knows no language model
and no framework, and needs numpy only, plus faiss once an embedder is used.
"""

from __future__ import annotations

from hypic_retriever.bm25 import BM25
from hypic_retriever.changes import Change
from hypic_retriever.embed import Embedder, MiniLM
from hypic_retriever.errors import DocumentError, EmbedderError, IndexFormatError, RetrieverError
from hypic_retriever.index import Hit, Index
from hypic_retriever.passages import Passage, Splitter
from hypic_retriever.reading import read_text
from hypic_retriever.vectors import VectorIndex

__all__ = [
    "BM25",
    "Change",
    "DocumentError",
    "Embedder",
    "EmbedderError",
    "Hit",
    "Index",
    "IndexFormatError",
    "MiniLM",
    "Passage",
    "RetrieverError",
    "Splitter",
    "VectorIndex",
    "read_text",
]
