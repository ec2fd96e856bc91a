"""Gated linear attention with one gate a head, which depends on the token (the scalar case of GLA, arXiv 2312.06635).

``S_t = a_t S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t``, with ``a_t = exp(g_t)``: Lightning's recurrence, where ``g``
comes from the token instead of being a constant. Nothing is computed differently, and states may be moved by rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypic.engine.linear.lightning import DecayInputs, Lightning


@dataclass(frozen=True)
class SimpleGLAInputs(DecayInputs):
    """As Lightning's; ``g [M, H, C]``, at most zero, is the logarithm of a gate such as ``sigmoid(w . x)``."""


class SimpleGLA(Lightning):
    """The family: one transition per head, ``[H]``."""
