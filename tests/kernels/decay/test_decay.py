"""Lift, read and step of decayed attention against a loop over tokens in float64, reference and kernel alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.decay import (
    Backend,
    DecayError,
    LiftConfig,
    Maps,
    Precision,
    ReadConfig,
    Rule,
    StepConfig,
    lift,
    read,
    reference,
    step,
)
from hypic_kernels.decay.check import Kind, LiftVariant, ReadVariant, StepVariant
from hypic_kernels.decay.layout import CHUNK_SIZES, lift_candidates, read_candidates, step_candidates
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.decay.rule import TOLERANCE
from hypic_kernels.trust import relative_error

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LIMIT = {"reference": 1e-12, "triton": 3e-6}

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
PREPARED: dict[str, dict[str, Any]] = {
    "ring": {"num_turned": 4},
    "minimax": {"has_norm": False, "silu": True},
    "all turned": {"num_turned": 8, "has_norm": False, "is_fixed": False},
    "all": {"num_turned": 3, "silu": True, "is_fixed": False},
    "plain": {"has_norm": False, "is_fixed": False},
}
prepared = pytest.mark.parametrize("features", PREPARED.values(), ids=PREPARED)


# -- the oracle: one token after the other -------------------------------------------------------------------------


def head_of(p: Problem, x: Tensor, weight: Tensor | None, token: int) -> Tensor:
    """q or k ``[K]`` as the recurrence takes it, by the layer's formulas and one pair of channels after the other."""
    x = x.double()
    if p.rule.silu:
        x = x / (1 + (-x).exp())
    if weight is not None:
        x = x / math.sqrt(float(x.dot(x)) / len(x) + p.rule.eps) * weight.double()
    if p.rule.cos is not None and p.rule.sin is not None:
        x, half = x.clone(), p.rule.cos.shape[1]
        for pair in range(half):
            cos, sin = float(p.rule.cos[token, pair]), float(p.rule.sin[token, pair])
            one, other = float(x[pair]), float(x[pair + half])
            x[pair], x[pair + half] = one * cos - other * sin, other * cos + one * sin
    return x


def advance(p: Problem, token: int, head: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state of one token, in float64."""
    shared = head // (p.v.shape[1] // p.k.shape[1])
    q = head_of(p, p.q[token, shared], p.rule.q_weight, token) * p.rule.scale
    k, v = head_of(p, p.k[token, shared], p.rule.k_weight, token), p.v[token, head].double()
    if p.rule.silu:
        v = v / (1 + (-v).exp())
    state = math.exp(float(p.g[token, head])) * state + torch.outer(k, v)
    return q @ state, state


def walked(p: Problem, lengths: tuple[int, ...]) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs ``[N, H, V]``, and per head the final state of each row, which starts from the state of its number."""
    outputs, finals = torch.empty(p.v.shape, dtype=F64), []
    for head in range(p.v.shape[1]):
        token, ends = 0, []
        for row, length in enumerate(lengths):
            state = p.states[row, head].double()
            for _ in range(length):
                outputs[token, head], state = advance(p, token, head, state)
                token += 1
            ends.append(state)
        finals.append(ends)
    return outputs, finals


def composed(p: Problem, shape: Shape, maps: Maps) -> tuple[Tensor, list[list[Tensor]]]:
    """States before the chunks ``[M, H, K, V]`` and finals, by applying the maps one after the other."""
    before, finals = torch.zeros(maps.end_state.shape, dtype=F64), []
    for head in range(p.v.shape[1]):
        chunk, ends = 0, []
        for row, length in enumerate(shape.lengths):
            state = p.states[row, head].double()
            for _ in range(-(-length // shape.size)):
                before[chunk, head] = state
                state = float(maps.transition[chunk, head]) * state + maps.end_state[chunk, head].double()
                chunk += 1
            ends.append(state)
        finals.append(ends)
    return before, finals


def check_chunks(shape: Shape, backend: Backend, limit: float) -> None:
    """Lifting, composing and reading gives what the loop gives; nothing of a chunk without tokens is written."""
    p = Problem.random(shape)
    given = p.wide() if backend == "reference" else p
    kept = [tensor.clone() for tensor in given.tokens]
    maps = lift(given.k, given.v, given.g, p.chunks, rule=given.rule, out=given.poisoned(given.q.dtype),
                backend=backend)  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(given.tokens, kept, strict=True))
    outputs, finals = walked(p, shape.lengths)
    before, ends = composed(p, shape, maps)
    for mine, truth in zip(ends, finals, strict=True):
        assert all(relative_error(one, other) < limit for one, other in zip(mine, truth, strict=True))
    before[~p.is_used] = math.nan
    out = torch.full(p.v.shape, math.nan, dtype=given.q.dtype)
    read(*given.tokens, before.to(given.q.dtype), p.chunks, out, rule=given.rule, backend=backend, precision="ieee")
    assert relative_error(out, outputs) < limit


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


def kind(dtype: torch.dtype, key_dim: int, value_dim: int, **features: Any) -> Kind:
    p = Problem.random(Shape(key_dim, value_dim, 2, 4, **features), dtype=dtype)
    return Kind.of(p.k, p.v, p.rule)


@needs_interpreter
@pytest.mark.parametrize("blocks", [(16, 16, 4), (32, 64, 8), (64, 16, 2)], ids=str)
def test_lift_and_read_are_the_same_in_any_layout(blocks: tuple[int, int, int]) -> None:
    for features in (PREPARED["ring"], PREPARED["minimax"]):
        problem = kind(F32, 40, 24, **features)
        assert LiftVariant(problem, 32, "ieee", LiftConfig(*blocks)).measure() < 1e-6
        assert ReadVariant(problem, F32, 32, "ieee", ReadConfig(*blocks)).measure() < 1e-6


# -- one token -----------------------------------------------------------------------------------------------------


def check_step(p: Problem, limit: float, backend: Backend, config: StepConfig | None = None) -> None:
    pool, (reads, writes) = p.pool(), p.slots()
    exact, outputs = pool.double(), torch.empty(p.v.shape, dtype=F64)
    for row, (source, target) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        for head in range(p.v.shape[1]):
            start = pool[source, head].double() if source >= 0 else torch.zeros(pool.shape[2:], dtype=F64)
            outputs[row, head], after = advance(p, row, head, start)
            if target >= 0:
                exact[target, head] = after
    out = torch.full(p.v.shape, math.nan)
    step(*p.tokens, pool, reads, writes, rule=p.rule, out=out, backend=backend, config=config)
    assert relative_error(pool, exact) < limit and relative_error(out, outputs) < limit


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


# -- on a GPU ------------------------------------------------------------------------------------------------------

HEAD_DIMS = [(64, 64), (96, 96), (128, 64), (192, 192), (24, 17)]
DTYPES: list[tuple[torch.dtype, Precision]] = [
    (F32, "ieee"), (F32, "tf32x3"), (F16, "tf32x3"), (BF16, "tf32x3"), (BF16, "bf16"),
]  # fmt: skip


def check_variants(problem: Kind, size: int, precision: Precision, num_layouts: int | None) -> None:
    """Of the first layouts, or of all."""
    dims = (problem.key_dim, problem.value_dim)
    lifts = [LiftVariant(problem, size, precision, each) for each in lift_candidates(size, *dims)[:num_layouts]]
    reads = [ReadVariant(problem, F32, size, precision, each) for each in read_candidates(size, *dims)[:num_layouts]]
    variants: list[LiftVariant | ReadVariant] = [*lifts, *reads]
    for variant in variants:
        assert variant.measure() <= variant.tolerance, variant


def on_gpu(dtype: torch.dtype, head_dims: tuple[int, int], **features: Any) -> Kind:
    return kind(dtype, *head_dims, **features)._replace(device=torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_every_layout_on_a_gpu(size: int) -> None:
    problem = on_gpu(BF16, (128, 128), num_turned=32)
    check_variants(problem, size, "bf16x3", None)
    reads = ReadVariant(problem, BF16, size, "bf16x3", read_candidates(size, 128, 128)[0])
    assert reads.measure() <= reads.tolerance
    for config in step_candidates(128, 128):
        steps = StepVariant(problem, F32, F32, config)
        assert steps.measure() <= steps.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), DTYPES, ids=str)
def test_every_precision_on_a_gpu(dtype: torch.dtype, precision: Precision) -> None:
    check_variants(on_gpu(dtype, (128, 128), num_turned=32), 16, precision, 1)


@pytest.mark.gpu
@prepared
def test_every_preparation_on_a_gpu(features: dict[str, Any]) -> None:
    problem = on_gpu(BF16, (64, 64), **features)
    check_variants(problem, 16, "bf16x3", 1)
    steps = StepVariant(problem, F32, BF16, step_candidates(64, 64)[0])
    assert steps.measure() <= steps.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_size_on_a_gpu(head_dims: tuple[int, int]) -> None:
    problem = on_gpu(BF16, head_dims, num_turned=head_dims[0] // 4)
    for size in (16, 64):
        check_variants(problem, size, "bf16x3", 1)
    steps = StepVariant(problem, F32, F32, step_candidates(*head_dims)[0])
    assert steps.measure() <= steps.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_many_programs_give_the_same_every_time(size: int) -> None:
    """Enough of them to fill the chip several times: a race would move the result."""
    shape = Shape(128, 128, 16, 16, size, lengths=(2000, 8, 8, 1), num_turned=32)
    p = Problem.random(shape, dtype=BF16, device="cuda")
    first, again = (lift(p.k, p.v, p.g, p.chunks, rule=p.rule, out=p.poisoned(), backend="triton") for _ in range(2))
    assert max(map(relative_error, first, p.lifted())) < TOLERANCE["bf16x3"]
    assert all(torch.equal(one[p.is_used], other[p.is_used]) for one, other in zip(first, again, strict=True))


SMALL = [(8, 8), (12, 8), (16, 16), (32, 16)]


@pytest.mark.parametrize("head_dims", SMALL, ids=str)
def test_small_heads_are_left_to_four_warps(head_dims: tuple[int, int]) -> None:
    """Eight on tiles of 64 x 16 are compiled to reads out of bounds (Triton 3.6, sm_90, tf32x3)."""
    for candidates in (lift_candidates, read_candidates):
        assert {config.num_warps for config in candidates(64, *head_dims)} == {4}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), DTYPES, ids=str)
@pytest.mark.parametrize("head_dims", SMALL, ids=str)
def test_many_programs_of_small_heads(head_dims: tuple[int, int], dtype: torch.dtype, precision: Precision) -> None:
    shape = Shape(*head_dims, 2, 2, 64, lengths=(8, 1, 131) * 40, silu=True, has_norm=False)
    p = Problem.random(shape, dtype=dtype, device="cuda")
    wide = p.wide()
    exact = reference.read(*wide.tokens, wide.states, p.chunks, wide.rule)
    for config in read_candidates(64, *head_dims):
        out = torch.full_like(p.v, torch.nan, dtype=F32)
        read(*p.tokens, p.states, p.chunks, out, rule=p.rule, precision=precision, backend="triton", config=config)
        assert relative_error(out, exact) < TOLERANCE[precision]


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chunks() -> None:
    """Captured on one cut of the tokens and replayed on another, with other states and slots."""
    shapes = [Shape(64, 64, 2, 4, 16, lengths, padding, num_turned=8)
              for lengths, padding in (((30, 2), 2), ((3, 17, 12), 1))]  # fmt: skip
    p, other = (Problem.random(shape, dtype=BF16, device="cuda", seed=n) for n, shape in enumerate(shapes))
    assert p.chunks.shape == other.chunks.shape
    maps, out, pool = p.poisoned(), torch.empty_like(p.v, dtype=F32), p.pool()
    reads, writes = (tensor.clone() for tensor in p.slots())

    def run() -> None:
        lift(p.k, p.v, p.g, p.chunks, rule=p.rule, out=maps)
        read(*p.tokens, p.states, p.chunks, out, rule=p.rule)
        step(*p.tokens, pool, reads, writes, rule=p.rule)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    p.chunks.copy_(other.chunks)
    p.states.copy_(other.states)
    pool.copy_(p.pool())
    graph.replay()
    assert max(map(relative_error, (t[p.is_used] for t in maps), (t[p.is_used] for t in p.lifted()))) < 1e-4
    again = torch.empty_like(out)
    read(*p.tokens, p.states, p.chunks, again, rule=p.rule, backend="reference")
    assert relative_error(out, again.double()) < 1e-4
