"""A plain, slow reference of position-independent reuse, in float64, token by token.

It is written from the contract and the model formulas alone and imports nothing of hypic, so that an
engine that agrees with it agrees for a reason. It is no fast path and keeps no cache of tensors
beyond one evaluation's needs.
"""

from tests.reference.algebra import Inputs, move, probe, recur
from tests.reference.chain import (
    AttentionEnd,
    AttentionEntry,
    Encoded,
    Faults,
    LinearEnd,
    LinearEntry,
    Live,
    Result,
    SegmentLink,
)
from tests.reference.model import Reference

__all__ = [
    "AttentionEnd",
    "AttentionEntry",
    "Encoded",
    "Faults",
    "Inputs",
    "LinearEnd",
    "LinearEntry",
    "Live",
    "Reference",
    "Result",
    "SegmentLink",
    "move",
    "probe",
    "recur",
]
