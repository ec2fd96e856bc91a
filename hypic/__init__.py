"""hypic: position-independent reuse of prompt segments on hybrid-attention language models."""

from hypic.config import EngineConfig
from hypic.errors import HypicError
from hypic.types import CacheReport, Completion, Policy, Prompt, SamplingParams, Segment, SegmentReport, Usage

__version__ = "0.1.0"
__all__ = [
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
