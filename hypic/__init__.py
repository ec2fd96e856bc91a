"""hypic: position-independent reuse of prompt segments on hybrid-attention language models."""

from typing import TYPE_CHECKING, Any

from hypic.config import EngineConfig
from hypic.errors import HypicError
from hypic.types import CacheReport, Completion, Policy, Prompt, SamplingParams, Segment, SegmentReport, Usage
from hypic.version import __version__

if TYPE_CHECKING:
    from hypic.llm import LLM
__all__ = [
    "LLM",
    "CacheReport",
    "Completion",
    "EngineConfig",
    "HypicError",
    "Policy",
    "Prompt",
    "SamplingParams",
    "Segment",
    "SegmentReport",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """``hypic.LLM`` brings torch with it, so it is imported when it is first asked for."""
    if name == "LLM":
        from hypic.llm import LLM

        return LLM
    raise AttributeError(f"module 'hypic' has no attribute {name!r}")
