"""Values of the reference: what a chain is made of, what an evaluation gives, and deliberate bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tests.reference.algebra import Inputs

Compose = Literal["transition", "addition", "last"]


@dataclass(frozen=True)
class Live:
    """Tokens that are run in context."""

    ids: Sequence[int]


@dataclass(frozen=True)
class SegmentLink:
    """A segment: its first ``seam`` tokens run in context, the rest is cached. Not longer than that: all live.

    ``cached`` says instead which tokens are, as ``(start, stop)`` in order; all others run in context. ``primer`` is
    what it is encoded behind, if not what all others are.
    """

    ids: Sequence[int]
    seam: int = 8
    cached: tuple[tuple[int, int], ...] | None = None
    primer: tuple[int, ...] | None = None

    @property
    def interiors(self) -> tuple[tuple[int, int], ...]:
        return ((self.seam, len(self.ids)),) if self.cached is None else self.cached


@dataclass(frozen=True)
class Faults:
    """Deliberate bugs; a test that claims exactness must fail under each that applies to its model.

    ``drop_transition``: an interior's T is forgotten (taken as the identity). ``empty_conv_tail``: an
    interior leaves no convolution inputs behind, so that those before it show through.
    ``shift_seam_by``: what is cached begins that many tokens after the seam's end (before it if negative).
    ``shift_position_by``: an interior's keys are rotated to positions that much too high.
    ``skip_rotation``: an interior's keys are not rotated at all.
    """

    drop_transition: bool = False
    empty_conv_tail: bool = False
    shift_seam_by: int = 0
    shift_position_by: int = 0
    skip_rotation: bool = False


@dataclass(frozen=True)
class How:
    """Ablations and faults of one evaluation; see ``Reference.evaluate``."""

    compose: Compose = "transition"
    rotate: bool = True
    faults: Faults = Faults()


@dataclass(frozen=True)
class LinearEntry:
    """An interior in a linear layer: T ``[H, K, K]``, B ``[H, K, V]``, conv tail ``[<= W-1, C]``, oldest first."""

    transition: Tensor
    end_state: Tensor
    conv_tail: Tensor


@dataclass(frozen=True)
class AttentionEntry:
    """An interior in an attention layer: unrotated keys (after qk-norm) and values ``[n, Hkv, D]``."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Encoded:
    """A segment's interior, one entry a layer; it begins with the segment's token ``start``."""

    layers: tuple[LinearEntry | AttentionEntry, ...]
    start: int
    num_tokens: int


@dataclass(frozen=True)
class LinearEnd:
    """A linear layer after the chain: state ``[H, K, V]`` and conv tail ``[<= W-1, C]``.

    ``row_inputs`` and ``row_raw`` are what the rows' tokens fed to recurrence and convolution.
    """

    state: Tensor
    conv_tail: Tensor
    row_inputs: Inputs
    row_raw: Tensor


@dataclass(frozen=True)
class AttentionEnd:
    """An attention layer after the chain: unrotated keys and values ``[M, Hkv, D]`` of all tokens, at ``positions``.

    ``row_keys`` and ``row_values`` are those of the rows' tokens alone.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    row_keys: Tensor
    row_values: Tensor


@dataclass(frozen=True)
class Result:
    """Logits ``[N, V]`` of the N tokens that were run, their absolute positions ``[N]``, and every layer's end."""

    logits: Tensor
    positions: Tensor
    layers: tuple[LinearEnd | AttentionEnd, ...]


@dataclass(frozen=True)
class Row:
    """Tokens to run; ``position`` is the absolute one of the first."""

    ids: tuple[int, ...]
    position: int


@dataclass(frozen=True)
class Interior:
    """A cached interior; ``position`` is the absolute one of its segment's first token, seam included."""

    entry: Encoded
    position: int


Chain = Sequence[Row | Interior]
SOUND = Faults()
