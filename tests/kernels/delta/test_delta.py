"""Lift, read and step against a loop over tokens in float64, reference and kernel alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hypic_kernels.delta import Backend, LiftConfig, StepConfig, lift, read, step
from hypic_kernels.delta.layout import CHUNK_SIZES, read_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.trust import relative_error
from tests.kernels.delta.oracle import (
    LIMIT,
    advance,
    check_lift,
    check_read,
    check_step,
    composed,
    needs_interpreter,
    walked,
)

F32 = torch.float32

on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


# -- chunks, against one token after the other ---------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "given"])
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_chunks_equal_tokens(size: int, is_raw: bool, backend: Backend) -> None:
    shape = Shape(24, 17, 2, 4, size, lengths=(8, 1, 2 * size + 3))
    check_lift(shape, backend, LIMIT[backend], is_raw=is_raw)


@on_both
@pytest.mark.parametrize("head_dims", [(16, 16), (5, 3), (1, 1), (96, 40)], ids=str)
def test_heads_of_any_size(head_dims: tuple[int, int], backend: Backend) -> None:
    check_lift(Shape(*head_dims, 1, 1, 16, lengths=(17,)), backend, LIMIT[backend])


@on_both
@pytest.mark.parametrize("lengths", [(1,), (16,), (15, 16, 17), ()], ids=str)
@pytest.mark.parametrize("padding", [0, 2])
def test_rows_around_a_chunk(lengths: tuple[int, ...], padding: int, backend: Backend) -> None:
    check_lift(Shape(8, 8, 1, 1, 16, lengths, padding), backend, LIMIT[backend])


@needs_interpreter
@pytest.mark.parametrize("place", [2, 15, 16, 40, 63])
def test_a_strong_decay_anywhere_in_a_chunk(place: int) -> None:
    """Chunks are solved in halves: from one to the other a decay is a product of two."""
    p = Problem.random(Shape(8, 8, 1, 1, 64, (64,), 0), is_raw=False)
    p.g[place], p.g[place // 2] = -30000.0, -80.0
    maps = lift(*p.tokens, p.chunks, rule=p.rule, out=p.poisoned(), backend="triton", precision="ieee")
    assert max(map(relative_error, maps[1:], p.lifted()[1:])) < 1e-6 and not maps.transition.any()


def test_a_strong_decay_does_not_blur_what_follows() -> None:
    """``e^(G_i - G_j)`` by differences of running sums would be off by 1e-3 behind a decay of e^-30000, in float32."""
    p = Problem.random(Shape(8, 8, 1, 1, 16, (16,), 0), is_raw=False)
    g = p.g.clone()
    g[2] = -30000.0
    exact = lift(*p.wide().tokens[:3], g.double(), p.beta.double(), p.chunks, rule=p.rule)
    mine = lift(p.q, p.k, p.v, g, p.beta, p.chunks, rule=p.rule)
    assert relative_error(mine.end_state, exact.end_state) < 1e-6
    running = g[:, 0].cumsum(0)
    assert abs(float((running[15] - running[5]) - g[6:16, 0].double().sum())) > 100 * 1e-6


@needs_interpreter
@pytest.mark.parametrize("config", [LiftConfig(16, 16, 4, 1), LiftConfig(64, 16, 8, 2), LiftConfig(16, 64, 2, 1)])
def test_lift_is_the_same_in_any_layout(config: LiftConfig) -> None:
    p = Problem.random(Shape(40, 24, 1, 2, 32, (33,)))
    maps = lift(*p.tokens, p.chunks, rule=p.rule, out=p.poisoned(), backend="triton", precision="ieee", config=config)
    assert max(map(relative_error, maps, p.lifted())) < 1e-6


@needs_interpreter
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("head_dims", [(24, 40), (16, 16), (5, 3)], ids=str)
def test_read_in_every_layout(head_dims: tuple[int, int], has_norm: bool) -> None:
    p = Problem.random(Shape(*head_dims, 1, 2, 16))
    for config in read_candidates(16, *head_dims, has_norm):
        check_read(p, 1e-6, has_norm=has_norm, config=config, precision="ieee")


@on_both
def test_rows_that_no_chunk_names_are_left_alone(backend: Backend) -> None:
    p = Problem.random(Shape(8, 8, 1, 1, 16, (20,)))
    maps = lift(*p.tokens, p.chunks, rule=p.rule)
    out = torch.full(p.v.shape, 7.0)
    read(maps.query[:1], maps.offset[:1], p.states, p.chunks[:1], out, places=torch.zeros(1, dtype=torch.int32),
         backend=backend)  # fmt: skip
    assert bool((out[16:] == 7).all()) and not bool((out[:16] == 7).any())


@on_both
def test_padding_reads_no_state(backend: Backend) -> None:
    """A padding chunk may name a place full of NaN, or none at all."""
    p = Problem.random(Shape(8, 8, 1, 1, 16, (3,), padding=1))
    maps = lift(*p.tokens, p.chunks, rule=p.rule)
    p.states[1] = math.nan
    places = torch.tensor([-1, 1], dtype=torch.int32)
    out = torch.full(p.v.shape, math.nan)
    read(maps.query, maps.offset, p.states, p.chunks, out, places=places, backend=backend)
    assert relative_error(out[:, 0], maps.offset[0, 0, :3].double()) < 1e-6


# -- one token -----------------------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "given"])
@pytest.mark.parametrize("head_dims", [(24, 40), (16, 16), (5, 3), (1, 1)], ids=str)
def test_step_is_one_token(head_dims: tuple[int, int], is_raw: bool, has_norm: bool, backend: Backend) -> None:
    check_step(Problem.random(Shape(*head_dims, 2, 4, lengths=(7,)), is_raw=is_raw), 1e-6, has_norm, backend)


@needs_interpreter
@pytest.mark.parametrize("config", [StepConfig(16, 4, 1), StepConfig(32, 8, 2), StepConfig(64, 4, 1)], ids=str)
def test_step_is_the_same_in_any_layout(config: StepConfig) -> None:
    check_step(Problem.random(Shape(24, 40, 1, 2, lengths=(4,))), 1e-6, True, "triton", config)


@on_both
def test_step_in_place(backend: Backend) -> None:
    """A row that writes the slot it reads; an unwritten slot keeps what it holds."""
    p = Problem.random(Shape(8, 8, 1, 2, lengths=(2,)))
    slots = torch.tensor([3, 1], dtype=torch.int32)
    states = p.states.clone()
    step(*p.tokens, states, slots, slots, rule=p.rule, backend=backend)
    for row, slot in enumerate(slots.tolist()):
        for head in range(2):
            _, after = advance(p, row, head, p.states[slot, head].double())
            assert relative_error(states[slot, head], after) < 1e-6
    assert all(torch.equal(states[slot], p.states[slot]) for slot in (0, 2, 4))


# -- what the tests above would see --------------------------------------------------------------------------------


def broken(change: Callable[[Problem], Problem]) -> float:
    """How far the lifted maps of a changed problem are from the right ones."""
    p = Problem.random(Shape(16, 16, 2, 4, 16, lengths=(8, 20)))
    return max(map(relative_error, change(p).lifted(), p.lifted()))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, k=p.k.flip(1)),
        lambda p: replace(p, rule=replace(p.rule, normalise=False)),
        lambda p: replace(p, rule=replace(p.rule, beta_scale=1.0)),
        lambda p: replace(p, chunks=p.chunks.roll(1, 1)),
        lambda p: replace(p, q=(p.q.view(torch.int32) & ~0x1FFF).view(F32).clone()),
    ],
    ids=["other head", "no norm", "other beta", "other places", "rounded to TF32"],
)
def test_errors_show(change: Callable[[Problem], Problem]) -> None:
    assert broken(change) > 100 * 1e-6


def test_a_transition_that_is_left_out_shows() -> None:
    shape = Shape(16, 16, 1, 2, 16, lengths=(40,))
    p = Problem.random(shape)
    maps = p.lifted()
    without = maps._replace(transition=torch.zeros_like(maps.transition))
    _, finals = walked(p, shape.lengths)
    assert relative_error(composed(p, shape, maps)[1][0][0], finals[0][0]) < 1e-12
    assert relative_error(composed(p, shape, without)[1][0][0], finals[0][0]) > 1e-3
