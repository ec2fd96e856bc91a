"""LangChain on hypic: a chat model, a string model, a documents chain and a retriever.

Segments travel as text content blocks (``segment``) or in a ``SegmentedStr``; they reach the engine
unmerged. Needs the ``langchain`` extra (``langchain-core``); importing it loads no torch.
"""

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError("hypic.integrations.langchain needs langchain-core: pip install 'hypic[langchain]'") from error

from hypic.integrations.langchain.blocks import segment, segments_from_documents
from hypic.integrations.langchain.chat import ChatHypic
from hypic.integrations.langchain.documents import DocumentsPlaceholder, create_segment_documents_chain
from hypic.integrations.langchain.llm import HypicLLM
from hypic.integrations.langchain.prompts import SegmentedStr, SegmentPromptValue
from hypic.integrations.langchain.retriever import HypicRetriever, RegisterDocuments, SearchIndex

__all__ = [
    "ChatHypic",
    "DocumentsPlaceholder",
    "HypicLLM",
    "HypicRetriever",
    "RegisterDocuments",
    "SearchIndex",
    "SegmentPromptValue",
    "SegmentedStr",
    "create_segment_documents_chain",
    "segment",
    "segments_from_documents",
]
