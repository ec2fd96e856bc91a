"""What composing is checked for, in the interpreter and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hypic_kernels.compose import NOT_WANTED, ZERO, Backend, Chains, Config, compose, fold
from hypic_kernels.compose.layout import Kind, Precision
from hypic_kernels.compose.problem import Problem, relative_error

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STORED = [(F32,), (F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32), (F16,)]
SHAPES = [(128, 128), (96, 192), (64, 64), (96, 40), (24, 17), (16, 16), (7, 3), (1, 1)]
BATCHES = [(), (0,), (0, 0, 0), (1,), (17,), (3, 0, 5, 1), (0, 2, 9, 0)]


def kernel_error(problem: Problem, precision: Precision = "ieee", config: Config | None = None) -> float:
    """The kernel's error against float64, after a look that it left its inputs alone."""
    from hypic_kernels.compose import triton as kernel

    inputs = (*problem.transitions, *problem.end_states, problem.initial, problem.chains.elements)
    copies = [tensor.clone() for tensor in inputs]
    before, final = problem.outputs()
    kernel.compose(*problem.arguments, before, final, precision, config, problem.turns)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))
    return max(map(relative_error, (before, final), problem.solve()))


def check_fold(kind: Kind, key_dim: int, value_dim: int, backend: Backend, device: str) -> None:
    """Applying a fold equals walking its elements."""
    drawn = Problem.random(kind, key_dim, value_dim, device=device)
    elements = drawn.chains.elements.clone()
    elements[:, 3] = NOT_WANTED
    chains = replace(drawn.chains, elements=elements, num_outputs=0)
    transition, end_state = fold(chains, drawn.transitions, drawn.end_states, backend=backend)
    assert transition.shape == (chains.num_chains, *drawn.transitions[0].shape[1:])
    state = torch.where((chains.initial_index >= 0).view(-1, 1, 1, 1), drawn.initial[chains.initial_index.clamp(0)], 0)
    missing = 0 if kind == "dense" else state.ndim - transition.ndim
    acted = transition @ state if kind == "dense" else transition[(...,) + (None,) * missing] * state
    assert relative_error(acted + end_state, drawn.solve()[1]) < 1e-6


def assert_shut_out(backend: Backend, device: str = "cpu") -> None:
    chains = Chains.of([0, 2], [0, ZERO], [0, 1], [ZERO], device=device)
    transitions = torch.eye(16, device=device).view(1, 1, 16, 16)
    end_states = torch.ones(2, 1, 16, 16, device=device)
    end_states[0] = math.nan
    before, final = compose(chains, [transitions], [end_states], torch.zeros_like(transitions), backend=backend)
    assert bool(before[1].isnan().all()) and torch.equal(final, torch.ones_like(final))
