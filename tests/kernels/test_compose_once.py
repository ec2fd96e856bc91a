"""What folds of one step's chains share between layers is that of their kind, shape and type, and never written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hypic_kernels.compose import NOT_WANTED, Chains, fold
from hypic_kernels.compose.layout import KINDS, Kind
from hypic_kernels.compose.problem import Problem


def folding(chains: Chains) -> Chains:
    elements = chains.elements.clone()
    elements[:, 3] = NOT_WANTED
    return replace(chains, elements=elements, num_outputs=0)


def test_layers_that_share_chains_get_what_each_gets_alone() -> None:
    """Of every kind, two sizes and two types, in turn and once more."""
    drawn = [Problem.random(kind, *sizes) for kind in KINDS for sizes in ((4, 6), (5, 3))]
    shared = folding(drawn[0].chains)
    for problem in [*drawn, *drawn]:
        for dtype in (torch.float32, torch.float64):
            maps = [[tensor.to(dtype) for tensor in tensors] for tensors in (problem.transitions, problem.end_states)]
            together, alone = (fold(chains, *maps) for chains in (shared, replace(shared)))
            assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
            assert all(tensor.dtype == dtype for tensor in together)


def test_what_is_shared_is_made_once() -> None:
    problem = Problem.random("head", 4, 6)
    chains, made = folding(problem.chains), []
    for number in range(3):
        chains.once("name", lambda number=number: made.append(number))  # type: ignore[misc]
    assert made == [0]
    assert chains.starting_at(0) is chains.starting_at(0) and chains.starting_at(0) is not chains.starting_at(-1)
    assert replace(chains).starting_at(0) is not chains.starting_at(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_goes_through_chains_that_inference_folded_before(kind: Kind) -> None:
    problem = Problem.random(kind, 4, 6)
    shared = folding(problem.chains)

    def maps() -> list[list[torch.Tensor]]:
        return [[x.double().requires_grad_() for x in group] for group in (problem.transitions, problem.end_states)]

    def gradients(chains: Chains) -> list[torch.Tensor]:
        given = maps()
        transition, end_state = fold(chains, *given)
        return list(torch.autograd.grad(transition.square().sum() + end_state.square().sum(), given[0]))

    with torch.inference_mode():
        fold(shared, *maps())
    alone, found = gradients(folding(problem.chains)), gradients(shared)
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    assert any(bool(one.any()) for one in found)
