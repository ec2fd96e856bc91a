"""In which form entries are kept: lossless, or smaller under a stated error.

*Rounding*: transitions and end states to bfloat16 (relative error at most 2^-8 a number); the scan stays in the state's
own type. *Dropping*: a head's transition whose norm is below ``drop_below`` becomes zero. Behind such an entry the
head's state is off by at most ``drop_below`` times the norm of the state before it, and the entry needs no bytes for it
where it is stored. The norm is the largest number of a diagonal and the Frobenius norm of a matrix, which no stretching
exceeds; one number per head is never dropped, since nothing is saved.

An entry takes its form when it is made, before its first use, so a fresh entry and a stored one answer alike. Applying
a form twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.affine import Affine


@dataclass(frozen=True)
class StorageForm:
    """``dtype`` is the type at rest, ``None`` for the state's own."""

    dtype: torch.dtype | None = None
    drop_below: float = 0.0

    @classmethod
    def of(cls, storage: str, drop_below: float) -> StorageForm:
        """From settings: ``storage`` is ``lossless`` or ``bfloat16``."""
        return cls(torch.bfloat16 if storage == "bfloat16" else None, drop_below)

    @property
    def is_lossless(self) -> bool:
        return self.dtype is None and self.drop_below == 0.0

    @property
    def name(self) -> str:
        """Part of every key."""
        rounded = "lossless" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return rounded if self.drop_below == 0.0 else f"{rounded},drop below {self.drop_below!r}"

    def applied(self, maps: Affine) -> Affine:
        """Maps as they are used from now on, in their own type."""
        transition, end_state = self._rounded(maps.transition), self._rounded(maps.end_state)
        if self.drop_below > 0.0 and transition.ndim > 2:
            kept = norms(transition) >= self.drop_below
            transition = torch.where(kept[(...,) + (None,) * (transition.ndim - 2)], transition, 0.0)
        return Affine(transition, end_state)

    def at_rest(self, tensor: Tensor) -> Tensor:
        """Numbers to which the form was applied, in the type in which they are stored: exactly the same numbers."""
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def kept_heads(self, transition: Tensor) -> Tensor | None:
        """Numbers of the heads whose transitions ``[H, ...]`` are not zero, or ``None`` where all are kept."""
        if self.drop_below == 0.0 or transition.ndim < 2:
            return None
        kept = transition.flatten(1).ne(0).any(1)
        return None if bool(kept.all()) else kept.nonzero().flatten().int()

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype).to(tensor.dtype)


def norms(transition: Tensor) -> Tensor:
    """By how much each head of ``[n, H, K]`` or ``[n, H, K, K]`` stretches a state at most: ``[n, H]``."""
    if transition.ndim == 3:
        return transition.abs().amax(-1)
    squares: Tensor = transition.square().sum((-2, -1))
    return squares.sqrt()
