"""The recurrences' affine maps: the probe against the multiplied-out formula, and moves of rotated states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.reference.algebra import (
    Inputs,
    formula,
    inverse_frequencies,
    move,
    probe,
    recur,
    rotate,
    rotation_matrix,
)

TOLERANCE = 1e-12


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest magnitude of ``b``."""
    return float((a - b).abs().max() / b.abs().max())


def random_inputs(family: str, num_tokens: int, seed: int = 0) -> Inputs:
    """Inputs of 3 heads, K 8, V 5, decaying slowly."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(num_tokens, 3, d, generator=g, dtype=torch.float64) for d in (8, 8, 5))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = 1 - 0.05 * torch.rand(num_tokens, 3, generator=g, dtype=torch.float64)
    beta = torch.rand(num_tokens, 3, generator=g, dtype=torch.float64)
    return Inputs(q, k, v, decay, beta if family == "delta" else None)


@pytest.mark.parametrize("family", ["delta", "lightning"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
def test_probe_is_the_formula(family: str, num_tokens: int) -> None:
    x = random_inputs(family, num_tokens)
    for found, expected in zip(probe(x), formula(x), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["delta", "lightning"])
def test_map_is_what_the_run_does_to_any_state(family: str) -> None:
    x = random_inputs(family, 30)
    state = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    transition, end_state = probe(x)
    _, expected = recur(x, state)
    assert relative(transition @ state + end_state, expected) < TOLERANCE
    for wrong in (state + end_state, end_state, transition @ state):
        assert relative(wrong, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["delta", "lightning"])
def test_maps_compose(family: str) -> None:
    x = random_inputs(family, 30)
    (t1, b1), (t2, b2), (t, b) = probe(x[:11]), probe(x[11:]), probe(x)
    assert relative(t2 @ t1, t) < TOLERANCE and relative(t2 @ b1 + b2, b) < TOLERANCE
    if family == "delta":
        assert relative(t1 @ t2, t) > 100 * TOLERANCE
    assert relative(t1 @ b2 + b1, b) > 100 * TOLERANCE


def test_lightning_transition_is_its_length_alone() -> None:
    x = random_inputs("lightning", 9)
    x = Inputs(x.q, x.k, x.v, torch.full_like(x.decay, 0.9))
    assert relative(probe(x)[0], 0.9**9 * torch.eye(8, dtype=torch.float64).expand(3, 8, 8)) < TOLERANCE


@pytest.mark.parametrize("rotary_dim", [2, 4, 8])
def test_rotation_depends_on_the_distance(rotary_dim: int) -> None:
    frequencies = inverse_frequencies(10_000.0, rotary_dim)
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, 8, generator=g, dtype=torch.float64) for _ in range(2))
    near = rotate(q, torch.tensor([7]), frequencies) * rotate(k, torch.tensor([3]), frequencies)
    far = rotate(q, torch.tensor([1007]), frequencies) * rotate(k, torch.tensor([1003]), frequencies)
    off = rotate(q, torch.tensor([1007]), frequencies) * rotate(k, torch.tensor([1004]), frequencies)
    assert relative(far.sum(-1), near.sum(-1)) < TOLERANCE < relative(off.sum(-1), near.sum(-1)) / 100
    by_matrix = torch.einsum("kl,nhl->nhk", rotation_matrix(11, 8, frequencies), k)
    assert relative(by_matrix, rotate(k, torch.tensor([11]), frequencies)) < TOLERANCE


@pytest.mark.parametrize("family", ["delta", "lightning"])
def test_a_moved_map_is_the_map_of_moved_keys(family: str) -> None:
    frequencies = inverse_frequencies(10_000.0, 4)
    x, local = random_inputs(family, 20), torch.arange(20)

    def at(position: int) -> tuple[Tensor, Tensor]:
        return probe(Inputs(x.q, rotate(x.k, position + local, frequencies), x.v, x.decay, x.beta))

    for found, expected in zip(move(*at(0), 345, frequencies), at(345), strict=True):
        assert relative(found, expected) < TOLERANCE
    assert relative(move(*at(0), 346, frequencies)[1], at(345)[1]) > 100 * TOLERANCE
    assert relative(at(0)[1], at(345)[1]) > 100 * TOLERANCE


def test_a_thousand_moves_are_one() -> None:
    frequencies = inverse_frequencies(10_000.0, 6)
    start = probe(random_inputs("delta", 20))
    steps = torch.randint(-500, 500, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    moved = start
    for distance in steps:
        moved = move(*moved, distance, frequencies)
    for found, expected in zip(moved, move(*start, sum(steps), frequencies), strict=True):
        assert relative(found, expected) < 1e-10
    for wrong in (sum(steps) + 1, sum(steps[1:]), 0):
        assert relative(move(*start, wrong, frequencies)[1], moved[1]) > 100 * 1e-10
