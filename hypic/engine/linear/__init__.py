"""Linear-attention families: what tokens do to a recurrent state, one file per family.

A family turns a *chunk* of at most 64 tokens into an affine map of the state and an affine
readout. With ``S`` the state before the chunk, the chunk's outputs are ``query @ S + offset`` and
the state after it is ``T S + B``. Everything else (chains, seams, reuse) is made of these maps in
``hypic.engine.affine``; a family knows nothing of it.

Chunk layout: ``[M, H, C, D]`` for ``M`` chunks of ``C`` tokens; a padded token has all inputs zero,
which every family must treat as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from hypic.engine.affine import Affine


@dataclass(frozen=True)
class Lifted:
    """What chunks do: ``maps`` of ``[M, ...]``; ``query [M, H, C, K]`` and ``offset [M, H, C, V]``."""

    maps: Affine
    query: Tensor
    offset: Tensor

    def read(self, before: Tensor) -> Tensor:
        """Outputs ``[M, H, C, V]``, given the states before the chunks, ``[M, H, K, V]``."""
        return self.query @ before + self.offset


Inputs = TypeVar("Inputs", contravariant=True)


class LinearFamily(Protocol, Generic[Inputs]):
    """All that a family implements.

    ``has_channel_gate``: its gate differs between channels of the key, so that states cannot be moved by rotation.
    """

    has_channel_gate: bool

    def lift(self, x: Inputs) -> Lifted:
        """Chunks to maps and readouts; the inputs' tensors are ``[M, H, C, ...]``."""
        ...

    def step(self, x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row: inputs ``[N, H, ...]``, state ``[N, H, K, V]`` -> outputs ``[N, H, V]``, new state."""
        ...
