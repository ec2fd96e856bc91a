"""Lift, read and step against a loop over tokens in float64, reference and kernel alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.delta import Backend, GatedNorm, LiftConfig, Maps, Precision, Rule, StepConfig, lift, read, step
from hypic_kernels.delta.layout import CHUNK_SIZES, lift_candidates, read_candidates, step_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import TOLERANCE
from hypic_kernels.trust import relative_error

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
Layout = TypeVar("Layout")
HEAD_DIMS = [(64, 64), (96, 192), (128, 128), (192, 192), (256, 256), (24, 17), (5, 3), (1, 1)]

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


# -- the oracle: one token after the other -------------------------------------------------------------------------


def token_inputs(p: Problem, token: int, head: int) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """``q, k [K]``, ``v [V]``, ``a = e^g`` and beta of one token and value head, by the layer's formulas."""
    shared = p.v.shape[1] // p.k.shape[1]
    q, k, v = p.q[token, head // shared].double(), p.k[token, head // shared].double(), p.v[token, head].double()
    g, beta = float(p.g[token, head]), float(p.beta[token, head])
    if p.rule.normalise:
        q, k = (x / math.sqrt(float(x.dot(x)) + p.rule.eps) for x in (q, k))
    if p.rule.A_log is not None and p.rule.dt_bias is not None:
        g = -math.exp(float(p.rule.A_log[head])) * math.log1p(math.exp(g + float(p.rule.dt_bias[head])))
        beta = p.rule.beta_scale / (1 + math.exp(-beta))
    return q * p.rule.scale, k, v, math.exp(g), beta


def advance(p: Problem, token: int, head: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state of one token, in float64."""
    q, k, v, a, beta = token_inputs(p, token, head)
    state = a * state
    state = state + beta * torch.outer(k, v - k @ state)
    return q @ state, state


def starts(p: Problem, head: int, row: int) -> Tensor:
    return p.states[row % len(p.states), head].double()


def walked(p: Problem, lengths: tuple[int, ...]) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs ``[N, H, V]``, and per head the final state of each row, from ``starts``."""
    outputs, finals = torch.empty(p.v.shape, dtype=F64), []
    for head in range(p.v.shape[1]):
        token, ends = 0, []
        for row, length in enumerate(lengths):
            state = starts(p, head, row)
            for _ in range(length):
                outputs[token, head], state = advance(p, token, head, state)
                token += 1
            ends.append(state)
        finals.append(ends)
    return outputs, finals


def composed(p: Problem, shape: Shape, maps: Maps) -> tuple[Tensor, list[list[Tensor]]]:
    """States before the chunks ``[M, H, K, V]`` and finals, by applying the maps one after the other."""
    before = torch.zeros(maps.end_state.shape, dtype=F64)
    finals = []
    for head in range(p.v.shape[1]):
        chunk, ends = 0, []
        for row, length in enumerate(shape.lengths):
            state = starts(p, head, row)
            for _ in range(-(-length // shape.size)):
                before[chunk, head] = state
                state = maps.transition[chunk, head].double() @ state + maps.end_state[chunk, head].double()
                chunk += 1
            ends.append(state)
        finals.append(ends)
    return before, finals


def check_lift(shape: Shape, backend: Backend, limit: float, *, is_raw: bool = True, dtype: torch.dtype = F32) -> None:
    """Lifting, composing and reading gives what the loop gives; padding is the identity; nothing is left unwritten."""
    p = Problem.random(shape, dtype=dtype, is_raw=is_raw)
    given = p.wide() if backend == "reference" else p
    kept = [tensor.clone() for tensor in given.tokens]
    maps = lift(*given.tokens, p.chunks, rule=p.rule, out=given.poisoned(given.q.dtype), backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(given.tokens, kept, strict=True))
    outputs, finals = walked(p, shape.lengths)
    before, ends = composed(p, shape, maps)
    for mine, truth in zip(ends, finals, strict=True):
        assert all(relative_error(one, other) < limit for one, other in zip(mine, truth, strict=True))
    out = torch.full(p.v.shape, math.nan, dtype=given.q.dtype)
    read(maps.query, maps.offset, before.to(given.q.dtype), p.chunks, out, backend=backend, precision="ieee")
    assert relative_error(out, outputs) < limit
    for padding in range(1, shape.padding + 1):
        assert torch.equal(maps.transition[-padding, 0], torch.eye(shape.key_dim, dtype=given.q.dtype))
        assert not maps.end_state[-padding].any() and not maps.query[-padding].any() and not maps.offset[-padding].any()


LIMIT = {"reference": 1e-12, "triton": 3e-6}


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


# -- shared with the tests on a GPU --------------------------------------------------------------------------------


def check_read(p: Problem, limit: float, *, has_norm: bool, out_dtype: torch.dtype = F32, **kernel: object) -> None:
    """Reading states by place, and the norm, against plain formulas in float64."""
    maps = Maps(*(tensor.float().contiguous() for tensor in p.lifted()))
    places = torch.arange(len(p.chunks), dtype=torch.int32, device=p.q.device) % (len(p.states) + 1) - 1
    out = torch.full(p.v.shape, math.nan, dtype=out_dtype, device=p.q.device)
    norm = p.norm if has_norm else None
    read(maps.query, maps.offset, p.states, p.chunks, out, places=places, norm=norm, backend="triton", **kernel)  # type: ignore[arg-type]
    exact = torch.full(p.v.shape, math.nan, dtype=F64)
    for chunk, place in enumerate(places.tolist()):
        state = p.states[place].double().cpu() if place >= 0 else torch.zeros_like(p.states[0]).double().cpu()
        found = maps.query[chunk].double().cpu() @ state + maps.offset[chunk].double().cpu()
        for index, token in enumerate(p.chunks[chunk].tolist()):
            if 0 <= token < len(exact):
                exact[token] = found[:, index]
    assert relative_error(out.cpu(), gated(exact, p.norm) if has_norm else exact) < limit


def gated(outputs: Tensor, norm: GatedNorm) -> Tensor:
    z, weight = norm.z.double().cpu(), norm.weight.double().cpu()
    scale = (outputs.pow(2).sum(-1, keepdim=True) / outputs.shape[-1] + norm.eps).sqrt()
    return outputs / scale * weight * z / (1 + (-z).exp())


def check_step(
    p: Problem, limit: float, has_norm: bool, backend: Backend, config: StepConfig | None = None, rounds: float = 0.0
) -> None:
    pool, (reads, writes) = p.pool(), p.slots()
    exact, outputs = pool.double().cpu(), torch.empty(p.v.shape, dtype=F64)
    host = replace(p, q=p.q.cpu(), k=p.k.cpu(), v=p.v.cpu(), g=p.g.cpu(), beta=p.beta.cpu(), rule=on_host(p.rule))
    for row, (source, target) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        for head in range(p.v.shape[1]):
            start = pool[source, head].double().cpu() if source >= 0 else torch.zeros(pool.shape[2:], dtype=F64)
            outputs[row, head], after = advance(host, row, head, start)
            if target >= 0:
                exact[target, head] = after
    out = torch.full_like(p.v, math.nan)
    norm = p.norm if has_norm else None
    step(*p.tokens, pool, reads, writes, rule=p.rule, norm=norm, out=out, backend=backend, config=config)
    assert relative_error(pool.cpu(), exact) < limit
    assert relative_error(out.cpu(), gated(outputs, p.norm) if has_norm else outputs) < limit + rounds


def on_host(rule: Rule) -> Rule:
    if rule.A_log is None or rule.dt_bias is None:
        return rule
    return replace(rule, A_log=rule.A_log.cpu(), dt_bias=rule.dt_bias.cpu())


# -- on a GPU ------------------------------------------------------------------------------------------------------

PRECISIONS: list[tuple[torch.dtype, Precision]] = [
    (F32, "ieee"), (F32, "tf32x3"), (F16, "tf32x3"), (BF16, "tf32x3"), (BF16, "bf16x3"), (BF16, "bf16"),
]  # fmt: skip


def lift_error(p: Problem, precision: Precision, config: LiftConfig | None = None) -> float:
    maps = lift(
        *p.tokens, p.chunks, rule=p.rule, out=p.poisoned(), precision=precision, backend="triton", config=config
    )
    return max(map(relative_error, maps, p.lifted()))


def limit_of(precision: Precision) -> float:
    return TOLERANCE["tf32x3"] if precision == "bf16x3" else TOLERANCE[precision]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS, ids=str)
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_every_layout_of_lift_on_a_gpu(size: int, dtype: torch.dtype, precision: Precision) -> None:
    for config in lift_candidates(size, 128, 128):
        p = Problem.random(Shape(128, 128, 2, 4, size, (8, 1, 3 * size + 5)), dtype=dtype, device="cuda")
        assert lift_error(p, precision, config) < limit_of(precision), config


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_lift_of_every_size_on_a_gpu(size: int, head_dims: tuple[int, int]) -> None:
    for dtype in (F32, BF16):
        for is_raw in (True, False):
            p = Problem.random(Shape(*head_dims, 2, 4, size), dtype=dtype, is_raw=is_raw, device="cuda")
            assert lift_error(p, "bf16x3" if dtype == BF16 else "tf32x3") < TOLERANCE["tf32x3"]


def tried(layouts: list[Layout], head_dims: tuple[int, int]) -> list[Layout]:
    """All layouts for the heads of most models, else the one that is taken; each takes a second or more to compile."""
    return layouts if head_dims == (128, 128) else layouts[:1]


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_layout_of_every_size_on_a_gpu(head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tried", lambda layouts, head_dims: layouts)
    for precision in ("ieee", "tf32x3", "bf16x3", "bf16"):
        test_read_on_a_gpu(head_dims, precision)
    for dtype in (F32, BF16, F16):
        test_step_on_a_gpu(head_dims, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "bf16x3", "bf16"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_read_on_a_gpu(head_dims: tuple[int, int], precision: Precision) -> None:
    for size in CHUNK_SIZES:
        for has_norm in (True, False):
            for config in tried(read_candidates(size, *head_dims, has_norm), head_dims):
                p = Problem.random(Shape(*head_dims, 2, 4, size), device="cuda")
                check_read(p, TOLERANCE[precision], has_norm=has_norm, precision=precision, config=config)
    rounded = Problem.random(Shape(*head_dims, 2, 4), dtype=BF16, device="cuda")
    check_read(rounded, TOLERANCE[precision] + 2**-8, has_norm=True, out_dtype=BF16, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_step_on_a_gpu(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    for config in tried(step_candidates(*head_dims), head_dims):
        for has_norm in (True, False):
            p = Problem.random(Shape(*head_dims, 2, 4, lengths=(9,)), dtype=dtype, device="cuda")
            check_step(p, 3e-6, has_norm, "triton", config, rounds=0.0 if dtype == F32 else 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_many_programs_give_the_same_every_time(size: int) -> None:
    """Enough of them to fill the chip several times: a race would move the result."""
    p = Problem.random(Shape(128, 128, 16, 32, size, lengths=(2000, 8, 8, 1)), dtype=BF16, device="cuda")
    assert lift_error(p, "bf16x3") < TOLERANCE["tf32x3"]
    first, again = (lift(*p.tokens, p.chunks, rule=p.rule, out=p.poisoned(), backend="triton") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chunks() -> None:
    """Captured on one cut of the tokens and replayed on another, with other states and slots."""
    p = Problem.random(Shape(64, 64, 2, 4, 16, (30, 2), padding=2), dtype=BF16, device="cuda")
    other = Problem.random(Shape(64, 64, 2, 4, 16, (3, 17, 12), padding=1), dtype=BF16, device="cuda", seed=1)
    assert p.chunks.shape == other.chunks.shape
    maps, out, pool = p.poisoned(), torch.empty_like(p.v), p.pool()
    places = torch.zeros(len(p.chunks), dtype=torch.int32, device="cuda")
    reads, writes = (tensor.clone() for tensor in p.slots())

    def run() -> None:
        lift(*p.tokens, p.chunks, rule=p.rule, out=maps)
        read(maps.query, maps.offset, p.states, p.chunks, out, places=places, norm=p.norm)
        step(*p.tokens, pool, reads, writes, rule=p.rule)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    p.chunks.copy_(other.chunks)
    p.v.copy_(other.v)
    places.copy_(torch.arange(len(places), dtype=torch.int32) % 3)
    for tensor in (*maps, out):
        tensor.fill_(math.nan)
    reads.fill_(2)
    pool.copy_(p.pool())
    graph.replay()
    torch.cuda.synchronize()
    assert max(map(relative_error, maps, p.lifted())) < TOLERANCE["tf32x3"]
    exact = torch.empty_like(p.v, dtype=F64)
    _, _, query, offset = (tensor.contiguous() for tensor in p.lifted())
    read(query, offset, p.states.double(), p.chunks, exact, places=places, norm=p.wide().norm, backend="reference")
    assert relative_error(out, exact) < 2**-8
    after = p.pool().double()
    step(*p.wide().tokens, after, reads, writes, rule=p.rule, backend="reference")
    assert relative_error(pool, after) < 3e-6
