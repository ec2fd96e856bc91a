"""LlamaIndex on hypic: a model, a synthesizer and a chat engine that keep retrieved nodes apart, a retriever, memory.

Segments travel as text blocks of a ``ChatMessage``, with hints in its ``additional_kwargs["hypic"]``; they reach the
engine unmerged. Needs the ``llamaindex`` extra (``llama-index-core``); importing it loads no torch.
"""

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise ImportError("this needs llama-index-core: pip install 'hypic[llamaindex]'") from error

from hypic.integrations._search import SearchIndex
from hypic.integrations.llamaindex.chat_engine import SegmentChatEngine
from hypic.integrations.llamaindex.llm import HypicLLM
from hypic.integrations.llamaindex.memory import HypicMemoryBlock
from hypic.integrations.llamaindex.messages import segment_message
from hypic.integrations.llamaindex.retriever import HypicRetriever, RegisterNodes, segments_from_nodes
from hypic.integrations.llamaindex.synthesizer import SegmentSynthesizer

__all__ = [
    "HypicLLM",
    "HypicMemoryBlock",
    "HypicRetriever",
    "RegisterNodes",
    "SearchIndex",
    "SegmentChatEngine",
    "SegmentSynthesizer",
    "segment_message",
    "segments_from_nodes",
]
