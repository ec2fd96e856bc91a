"""Lightning attention whose queries and keys are rotated in the linear layers too (Ring/Ling-linear 2.0).

At the level of the mixer: q, k ``[N, H, D]`` before rotation, v ``[N, H, V]``, one decay slope a head.
``q`` is scaled by ``D^-0.5`` here. A segment is encoded alone at positions 0, 1, ...; what is kept is
``(T, B)`` of its interior, with keys at local angles, and it is moved by rotating the key axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.algebra import Inputs, inverse_frequencies, move, probe, recur, rotate
from tests.reference.chain import SOUND, Faults


@dataclass(frozen=True)
class Ring:
    """A mixer's constants: slopes ``[H]`` (decay is ``exp(-slope)``), rotary base and rotated channels."""

    slopes: Tensor
    theta: float
    rotary_dim: int

    @property
    def frequencies(self) -> Tensor:
        return inverse_frequencies(self.theta, self.rotary_dim)

    def inputs(self, tokens: Tokens, position: int) -> Inputs:
        """The recurrence's inputs when the first token stands at ``position``."""
        positions = position + torch.arange(len(tokens.k))
        q = rotate(tokens.q, positions, self.frequencies) * tokens.q.shape[2] ** -0.5
        k = rotate(tokens.k, positions, self.frequencies)
        return Inputs(q, k, tokens.v, torch.exp(-self.slopes).expand(len(tokens.k), -1))


@dataclass(frozen=True)
class Tokens:
    """q, k ``[N, H, D]`` before rotation and v ``[N, H, V]``; ``seam=None`` for live text, else a segment's."""

    q: Tensor
    k: Tensor
    v: Tensor
    seam: int | None = None

    def __getitem__(self, tokens: slice) -> Tokens:
        return Tokens(self.q[tokens], self.k[tokens], self.v[tokens])


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes; between powers of two, those of the lower one and every other one of the next."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes if power == num_heads else slopes + alibi_slopes(2 * power)[0::2][: num_heads - power]


def ring_slopes(num_heads: int, layer_idx: int, num_layers: int, offset: int = 0) -> Tensor:
    """``[H]``: ALiBi slopes times ``1 - i / (L - 1) + 1e-5``; ``i = layer_idx + offset`` (sources say 0 or -1)."""
    factor = 1 - (layer_idx + offset) / max(num_layers - 1, 1) + 1e-5
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float64) * factor


def contiguous(ring: Ring, tokens: Tokens, position: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, H, V]`` and the end state ``[H, D, V]`` of one run from the zero state."""
    return recur(ring.inputs(tokens, position))


def chain(ring: Ring, links: Sequence[Tokens], faults: Faults = SOUND) -> tuple[Tensor, Tensor]:
    """Outputs of the tokens that are run, and the end state: live text and seams run, interiors are moved."""
    _, state = recur(ring.inputs(links[0][:0], 0))
    outputs, position = [], 0
    for link in links:
        seam = len(link.k) if link.seam is None else min(link.seam, len(link.k))
        o, state = recur(ring.inputs(link[:seam], position), state)
        outputs.append(o)
        if seam < len(link.k):
            transition, end_state = _moved(ring, link, seam, position, faults)
            state = (state if faults.drop_transition else transition @ state) + end_state
        position += len(link.k)
    return torch.cat(outputs), state


def _moved(ring: Ring, segment: Tokens, seam: int, position: int, faults: Faults) -> tuple[Tensor, Tensor]:
    start = max(seam + faults.shift_seam_by, 0)
    alone = probe(ring.inputs(segment, 0)[start:])
    distance = 0 if faults.skip_rotation else position + faults.shift_position_by
    return move(*alone, distance, ring.frequencies)
