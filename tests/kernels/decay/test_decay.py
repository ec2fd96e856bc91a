"""Lift, read and step of decayed attention against a loop over tokens in float64, reference and kernel alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

from hypic_kernels import available, interpreted
from hypic_kernels.decay import Backend, DecayError, LiftConfig, ReadConfig, Rule, StepConfig, lift, read, step
from hypic_kernels.decay.check import LiftVariant, ReadVariant
from hypic_kernels.decay.layout import CHUNK_SIZES, step_candidates
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.trust import relative_error
from tests.kernels.decay.oracle import LIMIT, PREPARED, advance, check_chunks, check_step, kind, prepared

F32 = torch.float32

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


# -- chunks, against one token after the other ---------------------------------------------------------------------


@on_both
@prepared
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_chunks_equal_tokens(size: int, features: dict[str, Any], backend: Backend) -> None:
    shape = Shape(24, 17, 2, 4, size, lengths=(8, 1, size + 3), **features)
    check_chunks(shape, backend, LIMIT[backend])


@on_both
@pytest.mark.parametrize("head_dims", [(16, 16), (5, 3), (1, 1), (96, 40)], ids=str)
def test_heads_of_any_size(head_dims: tuple[int, int], backend: Backend) -> None:
    check_chunks(Shape(*head_dims, 1, 1, 16, lengths=(17,)), backend, LIMIT[backend])


@on_both
@pytest.mark.parametrize("lengths", [(1,), (16,), (15, 16, 17), ()], ids=str)
@pytest.mark.parametrize("padding", [0, 2])
def test_rows_around_a_chunk(lengths: tuple[int, ...], padding: int, backend: Backend) -> None:
    check_chunks(Shape(8, 8, 1, 1, 16, lengths, padding, num_turned=2), backend, LIMIT[backend])


@on_both
def test_a_strong_decay_does_not_blur_what_follows(backend: Backend) -> None:
    """``e^(G_i - G_j)`` by differences of running sums would be off by 1e-3 behind a decay of e^-30000, in float32."""
    p = Problem.random(Shape(8, 8, 1, 1, 16, (16,), 0, is_fixed=False))
    p.g[2] = -30000.0
    maps = lift(p.k, p.v, p.g, p.chunks, rule=p.rule, out=p.poisoned(), backend=backend, precision="ieee")
    assert relative_error(maps.end_state, p.lifted().end_state) < 1e-6 and not maps.transition.any()
    running = p.g[:, 0].cumsum(0)
    assert abs(float((running[15] - running[5]) - p.g[6:16, 0].double().sum())) > 100 * 1e-6


@on_both
def test_rows_that_no_chunk_names_are_left_alone(backend: Backend) -> None:
    p = Problem.random(Shape(8, 8, 1, 1, 16, (20,)))
    out = torch.full(p.v.shape, 7.0)
    read(*p.tokens, p.states, p.chunks[:1], out, rule=p.rule, backend=backend)
    assert bool((out[16:] == 7).all()) and not bool((out[:16] == 7).any())


@needs_interpreter
@pytest.mark.parametrize("blocks", [(16, 16, 4), (32, 64, 8), (64, 16, 2)], ids=str)
def test_lift_and_read_are_the_same_in_any_layout(blocks: tuple[int, int, int]) -> None:
    for features in (PREPARED["ring"], PREPARED["minimax"]):
        problem = kind(F32, 40, 24, **features)
        assert LiftVariant(problem, 32, "ieee", LiftConfig(*blocks)).measure() < 1e-6
        assert ReadVariant(problem, F32, 32, "ieee", ReadConfig(*blocks)).measure() < 1e-6


# -- one token -----------------------------------------------------------------------------------------------------


@on_both
@prepared
@pytest.mark.parametrize("head_dims", [(24, 40), (16, 16), (17, 3)], ids=str)
def test_step_is_one_token(head_dims: tuple[int, int], features: dict[str, Any], backend: Backend) -> None:
    shape = Shape(*head_dims, 2, 4, lengths=(7,), **features)
    check_step(Problem.random(shape), 1e-6, backend)


@needs_interpreter
@pytest.mark.parametrize("config", step_candidates(40, 70), ids=str)
def test_step_is_the_same_in_any_layout(config: StepConfig) -> None:
    check_step(Problem.random(Shape(40, 70, 1, 2, lengths=(4,), num_turned=8)), 1e-6, "triton", config)


@on_both
def test_step_in_place(backend: Backend) -> None:
    """A row that writes the slot it reads; an unwritten slot keeps what it holds."""
    p = Problem.random(Shape(8, 8, 1, 2, lengths=(2,), padding=4))
    slots, states = torch.tensor([3, 1], dtype=torch.int32), p.states.clone()
    step(*p.tokens, states, slots, slots, rule=p.rule, backend=backend)
    for row, slot in enumerate(slots.tolist()):
        for head in range(2):
            _, after = advance(p, row, head, p.states[slot, head].double())
            assert relative_error(states[slot, head], after) < 1e-6
    assert all(torch.equal(states[slot], p.states[slot]) for slot in (0, 2, 4))


# -- what the tests above would see --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, k=p.k.flip(1)),
        lambda p: replace(p, rule=replace(p.rule, silu=True)),
        lambda p: replace(p, rule=replace(p.rule, cos=p.rule.cos.roll(1, 0), sin=p.rule.sin.roll(1, 0))),
        lambda p: replace(p, rule=replace(p.rule, k_weight=p.rule.k_weight + 0.01)),
        lambda p: replace(p, chunks=p.chunks.roll(1, 1)),
        lambda p: replace(p, g=p.g * 1.01),
    ],
    ids=["other head", "silu", "other angles", "other weight", "other places", "other decay"],
)
def test_errors_show(change: Callable[[Problem], Problem]) -> None:
    p = Problem.random(Shape(16, 16, 2, 4, 16, lengths=(8, 20), num_turned=4))
    assert max(map(relative_error, change(p).lifted(), p.lifted())) > 100 * 3e-6


def test_what_does_not_fit() -> None:
    p = Problem.random(Shape(8, 8, 2, 4, 16, (20,), num_turned=2))
    for wrong in (p.k[:, :, :4], p.k.double(), p.k.mT.contiguous().mT):
        with pytest.raises(DecayError):
            lift(wrong, p.v, p.g, p.chunks, rule=p.rule)
    with pytest.raises(DecayError, match="chunks"):
        lift(p.k, p.v, p.g, p.chunks[:, :8].contiguous(), rule=p.rule)
    with pytest.raises(DecayError, match="rows"):
        read(*p.tokens, p.states[:1], p.chunks, torch.empty_like(p.v), rule=p.rule)
    with pytest.raises(DecayError, match="angles"):
        lift(p.k, p.v, p.g, p.chunks, rule=replace(p.rule, cos=torch.ones(20, 5), sin=torch.ones(20, 5)))
    with pytest.raises(DecayError, match="both"):
        Rule(q_weight=torch.ones(8))
    with pytest.raises(DecayError, match="write_slots"):
        step(*p.tokens, p.states, torch.zeros(20, dtype=torch.int32), torch.zeros(20), rule=p.rule)
