"""LangChain on hypic: a chat model, a string model, a documents chain, a retriever, and middleware for agents.

Segments travel as text content blocks (``segment``) or in a ``SegmentedStr``; they reach the engine
unmerged. Needs the ``langchain`` extra (``langchain-core``; for ``HypicMiddleware`` ``langchain``);
importing it loads no torch.
"""

from typing import TYPE_CHECKING, Any

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError("hypic.integrations.langchain needs langchain-core: pip install 'hypic[langchain]'") from error

from hypic.integrations._search import SearchIndex
from hypic.integrations.langchain.blocks import segment, segments_from_documents
from hypic.integrations.langchain.chat import ChatHypic
from hypic.integrations.langchain.documents import DocumentsPlaceholder, create_segment_documents_chain
from hypic.integrations.langchain.llm import HypicLLM
from hypic.integrations.langchain.prompts import SegmentedStr, SegmentPromptValue
from hypic.integrations.langchain.retriever import HypicRetriever, RegisterDocuments, create_segment_retriever_tool

if TYPE_CHECKING:
    from hypic.integrations.langchain.middleware import HypicMiddleware

__all__ = [
    "ChatHypic",
    "DocumentsPlaceholder",
    "HypicLLM",
    "HypicMiddleware",
    "HypicRetriever",
    "RegisterDocuments",
    "SearchIndex",
    "SegmentPromptValue",
    "SegmentedStr",
    "create_segment_documents_chain",
    "create_segment_retriever_tool",
    "segment",
    "segments_from_documents",
]


def __getattr__(name: str) -> Any:
    """The middleware needs all of LangChain, so it is imported when it is first asked for."""
    if name != "HypicMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from hypic.integrations.langchain.middleware import HypicMiddleware
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("langchain", "langgraph"):
            raise
        raise ImportError("HypicMiddleware needs langchain: pip install 'langchain>=1.0'") from error
    return HypicMiddleware
