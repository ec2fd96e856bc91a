"""hypic: position-independent reuse of prompt segments on hybrid-attention language models."""

from typing import TYPE_CHECKING, Any

from hypic.config import EngineConfig
from hypic.errors import HypicError
from hypic.types import CacheReport, Completion, Policy, Prompt, SamplingParams, Segment, SegmentReport, Usage
from hypic.version import __version__

if TYPE_CHECKING:
    from hypic.checkpoints import describe
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
    "describe",
]


def __getattr__(name: str) -> Any:
    """``hypic.LLM`` and ``hypic.describe`` bring torch with them, so they are imported when first asked for."""
    if name == "describe":
        from hypic.checkpoints import describe

        return describe
    if name == "LLM":
        from hypic.llm import LLM

        return LLM
    raise AttributeError(f"module 'hypic' has no attribute {name!r}")
