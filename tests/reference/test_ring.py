"""Lightning with rotary keys: a chain with moved segments equals one contiguous run."""

from __future__ import annotations

import pytest
import torch

from tests.reference.chain import Faults
from tests.reference.ring import Ring, Tokens, chain, contiguous, ring_slopes
from tests.reference.test_algebra import relative

TOLERANCE = 1e-11
HEAD_DIM = 8


def make(rotary_dim: int, lengths: list[int], seam: int, seed: int = 0) -> tuple[Ring, Tokens, list[Tokens]]:
    """A mixer, all tokens in a row, and the same as links: odd ones are segments."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), 4, d, generator=g, dtype=torch.float64) for d in (HEAD_DIM, HEAD_DIM, 6))
    whole, links, start = Tokens(q, k, v), [], 0
    for i, length in enumerate(lengths):
        part = whole[slice(start, start + length)]
        links.append(Tokens(part.q, part.k, part.v, seam if i % 2 else None))
        start += length
    return Ring(ring_slopes(4, 3, 20), 10_000.0, rotary_dim), whole, links


def run_tokens(lengths: list[int], seam: int) -> list[int]:
    """Where the tokens that are run stand."""
    places: list[int] = []
    start = 0
    for i, length in enumerate(lengths):
        places += range(start, start + (min(seam, length) if i % 2 else length))
        start += length
    return places


LENGTHS = [5, 40, 1, 9, 3, 8, 2, 63, 6]


@pytest.mark.parametrize("rotary_dim", [4, HEAD_DIM])
@pytest.mark.parametrize("seam", [0, 4, 8, 16])
def test_chain_equals_one_run(rotary_dim: int, seam: int) -> None:
    ring, whole, links = make(rotary_dim, LENGTHS, seam)
    expected, end = contiguous(ring, whole)
    outputs, state = chain(ring, links)
    assert relative(outputs, expected[run_tokens(LENGTHS, seam)]) < TOLERANCE
    assert relative(state, end) < TOLERANCE


@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop_transition=True),
        Faults(shift_seam_by=1),
        Faults(shift_seam_by=-1),
        Faults(shift_position_by=1),
        Faults(skip_rotation=True),
    ],
    ids=str,
)
def test_faults_bite(faults: Faults) -> None:
    ring, whole, links = make(4, LENGTHS, 8)
    expected, end = contiguous(ring, whole)
    outputs, state = chain(ring, links, faults)
    assert relative(outputs, expected[run_tokens(LENGTHS, 8)]) > 100 * TOLERANCE
    assert relative(state, end) > 100 * TOLERANCE


def test_only_distances_matter() -> None:
    ring, whole, _ = make(4, LENGTHS, 8)
    expected, _ = contiguous(ring, whole)
    outputs, _ = contiguous(ring, whole, position=777)
    assert relative(outputs, expected) < TOLERANCE


def test_slopes() -> None:
    assert ring_slopes(8, 0, 20).tolist() == pytest.approx([2.0 ** -(h + 1) * (1 + 1e-5) for h in range(8)], rel=1e-12)
    assert ring_slopes(8, 4, 20, offset=-1)[0].item() == pytest.approx(0.5 * (1 - 3 / 19 + 1e-5), rel=1e-12)
    six = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert (ring_slopes(6, 0, 20) / (1 + 1e-5)).tolist() == pytest.approx(six, rel=1e-12)
