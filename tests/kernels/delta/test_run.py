"""Rows that carry their state: the reference against the loop over tokens, the gathering kernels, and how fla's pieces
are called. fla itself runs on a GPU alone; elsewhere pieces in plain torch, of the meaning that is relied on, stand in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic_kernels.delta import DeltaError, GatedNorm, Rule, chunked, run, runs_here
from hypic_kernels.delta.check import RunVariant, SettleVariant
from hypic_kernels.delta.layout import CarryConfig
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import TOLERANCE
from hypic_kernels.rows import Rows, row_arrays
from hypic_kernels.trust import relative_error
from tests.kernels.delta.test_delta import advance, needs_interpreter, starts, walked

F64 = torch.float64
LENGTHS = (70, 64, 1, 130)


def problem_of(lengths: tuple[int, ...], *, is_raw: bool = True, heads: tuple[int, int] = (2, 4)) -> Problem:
    return Problem.random(Shape(24, 17, *heads, 64, lengths, 0), is_raw=is_raw)


def initial_of(p: Problem, num_rows: int) -> Tensor:
    return p.states[torch.arange(num_rows) % len(p.states)].contiguous()


def ran(p: Problem, rows: Rows, initial: Tensor, norm: GatedNorm | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Outputs of all tokens, final states, transitions; what is not written is NaN."""
    out = torch.full(p.v.shape, math.nan, dtype=p.v.dtype, device=p.v.device)
    return out, *run(*p.tokens, rows, initial, out, rule=p.rule, norm=norm, **options)


def test_chunks_are_counted_row_by_row() -> None:
    made = row_arrays(LENGTHS)
    assert made.cu_seqlens.tolist() == [0, 70, 134, 135, 265] and made.chunk_offsets.tolist() == [0, 2, 3, 4, 7]
    assert made.chunk_indices.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
    rows = Rows.of(LENGTHS, 2, marks={3: 0})
    assert (rows.num_rows, rows.num_folds, rows.num_marks) == (4, 2, 1)
    assert rows.folds.tolist() == [[0, 2], [2, 3]] and rows.marks.tolist() == [-1, -1, -1, 0, -1, -1, -1]


@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "given"])
def test_the_reference_equals_tokens_one_after_the_other(is_raw: bool) -> None:
    p = problem_of(LENGTHS, is_raw=is_raw)
    out, final, transitions = ran(p.wide(), Rows.of(LENGTHS, 2), initial_of(p, 4).double())
    outputs, finals = walked(p, LENGTHS)
    assert relative_error(out, outputs) < 1e-12
    for head, ends in enumerate(finals):
        assert all(relative_error(final[row, head], end) < 1e-12 for row, end in enumerate(ends))
    assert transitions.shape == (2, 4, 24, 24)
    # A row's transition is what the loop does to the difference of two states.
    for head in range(4):
        one, other = starts(p, head, 0), torch.zeros(24, 17, dtype=F64)
        for token in range(70):
            one, other = advance(p, token, head, one)[1], advance(p, token, head, other)[1]
        assert relative_error(transitions[0, head] @ starts(p, head, 0), one - other) < 1e-8


def test_rows_name_tokens_in_any_order_and_others_are_left() -> None:
    p, lengths = problem_of((200,)).wide(), (70, 64)
    tokens = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:134].to(torch.int32)
    rows, initial = replace(Rows.of(lengths, 1), tokens=tokens), initial_of(p, 2)
    out, final, transitions = ran(p, rows, initial, p.norm)
    picked = replace(p, **{name: getattr(p, name)[tokens.long()] for name in ("q", "k", "v", "g", "beta")})
    norm = GatedNorm(p.norm.z[tokens.long()], p.norm.weight, p.norm.eps)
    expected = ran(picked, Rows.of(lengths, 1), initial, norm)
    found = (out[tokens.long()], final, transitions)
    assert all(relative_error(one, other) < 1e-12 for one, other in zip(found, expected, strict=True))
    assert int(out.isnan().all(-1).all(-1).sum()) == 66


# -- how fla's pieces are called ---------------------------------------------------------------------------------------


def plain_pieces() -> chunked.Pieces:
    """fla's pieces in plain torch; ``[1, n, ...]`` in and out, ``g`` summed within chunks, to base 2."""

    def spans(cu_seqlens: Tensor, chunk_indices: Tensor, chunk_size: int) -> Iterator[slice]:
        for row, number in chunk_indices.tolist():
            first, end = int(cu_seqlens[row]) + number * chunk_size, int(cu_seqlens[row + 1])
            yield slice(first, min(first + chunk_size, end))

    def heads(k: Tensor, num_heads: int) -> Tensor:
        return k[0].repeat_interleave(num_heads // k.shape[2], 1).transpose(0, 1)

    def sums(g: Tensor, scale: float, **where: Any) -> Tensor:
        out = torch.empty_like(g)
        for span in spans(**where):
            out[:, span] = g[:, span].cumsum(1) * scale
        return out

    def decays(g: Tensor) -> Tensor:
        """``[H, c, c]``: from the second to the first, below the diagonal and on it."""
        g = g[0].T
        return torch.exp2(g[..., :, None] - g[..., None, :]).tril()

    def w_u(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **where: Any) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, keys = v.shape[2], heads(k, v.shape[2])
        w, u = keys.transpose(0, 1).new_empty((1, *keys.transpose(0, 1).shape)), torch.empty_like(v)
        for span in spans(**where):
            key, strength = keys[:, span], beta[0, span].T[..., None]
            couplings = (strength * decays(g[:, span]) * (key @ key.mT)).tril(-1)
            inverse = torch.linalg.inv(torch.eye(key.shape[1]).expand(num_heads, -1, -1) + couplings)
            w[0, span] = (inverse @ (strength * torch.exp2(g[0, span].T)[..., None] * key)).transpose(0, 1)
            u[0, span] = (inverse @ (strength * v[0, span].transpose(0, 1))).transpose(0, 1)
        return w, u, w

    def states(
        k: Tensor, w: Tensor, u: Tensor, g: Tensor, initial_state: Tensor, chunk_offsets: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        where = {name: rest[name] for name in ("cu_seqlens", "chunk_indices", "chunk_size")}
        keys, before, values = heads(k, w.shape[2]), [], torch.empty_like(u)
        final = initial_state.clone()
        for (row, number), span in zip(rest["chunk_indices"].tolist(), spans(**where), strict=True):
            assert int(chunk_offsets[row]) + number == len(before)
            state, last = final[row], torch.exp2(g[0, span][-1])
            before.append(state.clone())
            value = u[0, span].transpose(0, 1) - w[0, span].transpose(0, 1) @ state
            values[0, span] = value.transpose(0, 1)
            remaining = torch.exp2(g[0, span][-1] - g[0, span]).T[..., None]
            final[row] = last[:, None, None] * state + keys[:, span].mT @ (remaining * value)
        assert rest["output_final_state"]
        return torch.stack(before)[None], values if rest.get("save_new_value", True) else None, final

    def outputs(q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor, scale: float, **where: Any) -> Tensor:
        queries, keys, out = heads(q, v.shape[2]), heads(k, v.shape[2]), torch.empty_like(v)
        for number, span in enumerate(spans(**where)):
            grown = torch.exp2(g[0, span].T)[..., None] * queries[:, span] @ h[0, number]
            seen = (queries[:, span] @ keys[:, span].mT * decays(g[:, span])) @ v[0, span].transpose(0, 1)
            out[0, span] = (scale * (grown + seen)).transpose(0, 1)
        return out

    return chunked.Pieces(sums, w_u, states, outputs)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "pieces", plain_pieces)


def by_pieces(p: Problem, rows: Rows, initial: Tensor) -> tuple[Tensor, ...]:
    out = torch.full(p.v.shape, math.nan)
    slots = torch.arange(len(initial), dtype=torch.int32)
    kept, transitions = chunked.run(*p.tokens, rows, (initial, slots), p.rule, p.norm, out)
    return out, kept, transitions


@needs_interpreter
@pytest.mark.parametrize("num_folds", [0, 2])
@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "given"])
def test_pieces_in_their_order_give_what_the_reference_gives(stood_in: None, is_raw: bool, num_folds: int) -> None:
    p = problem_of((300,), is_raw=is_raw)
    tokens = torch.randperm(300, generator=torch.Generator().manual_seed(3))[:265].to(torch.int32)
    rows, initial = replace(Rows.of(LENGTHS, num_folds), tokens=tokens), initial_of(p, 4)
    found, wide = by_pieces(p, rows, initial), p.wide()
    expected = ran(wide, rows, initial.double(), wide.norm)
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(found, expected, strict=True) if len(other))
    assert found[2].shape == (num_folds, 4, 24, 24)


@needs_interpreter
@pytest.mark.parametrize("dims", [(24, 17), (130, 16)], ids=str)
@pytest.mark.parametrize("heads", [(2, 4), (1, 3)], ids=str)
def test_chunks_are_solved_as_by_fla(stood_in: None, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    """Running sums, ``w`` and ``u``, by one kernel and by pieces of fla's meaning."""
    p = Problem.random(Shape(*dims, *heads, 64, (70, 64, 1, 33), 0))
    rows = replace(Rows.of((70, 64, 1, 33)), tokens=torch.arange(168, dtype=torch.int32).flip(0))
    x = chunked.gathered(p.q, p.k, p.g, p.beta, rows, p.rule)
    made = chunked.chunked(x, p.v, rows), chunked.chunked_by_fla(x, p.v, rows)
    assert all(relative_error(one, other.double()) < 1e-6 for one, other in zip(*made, strict=True))
    other = chunked.chunked(x._replace(beta=x.beta / 2), p.v, rows)
    assert relative_error(other.w, made[1].w.double()) > 100 * 1e-6


PARTS = (8, 100, 64, 1, 92)
# Parts of the first row, of the second and of the third: each but a row's last is filled up to a chunk.
IN_PARTS = (*range(8), *[-1] * 56, *range(8, 108), *[-1] * 28, *range(108, 172), *range(172, 173), *[-1] * 63)


def in_parts(p: Problem) -> Rows:
    """Two rows in parts, with folds in their middle and at their end, and a row of one part."""
    tokens = [*IN_PARTS, *range(173, 265)]
    return Rows.of((256, 156), folds=[(1, 3), (5, 7)], marks={1: 1, 3: 0, 5: 2}, tokens=tokens)


def test_a_row_in_parts_is_its_parts_one_after_the_other() -> None:
    p = problem_of((265,)).wide()
    out, kept, transitions = ran(p, in_parts(p), initial_of(p, 2), p.norm)
    outputs, state, ends, maps = torch.empty_like(out), initial_of(p, 2), list[Tensor](), list[Tensor]()
    begin, before = 0, state[:1]
    for number, length in enumerate(PARTS):
        before = state[1:] if number == 3 else before
        part = replace(Rows.of((length,), 1), tokens=torch.arange(begin, begin + length, dtype=torch.int32))
        found = torch.empty_like(out)
        before, made = run(*p.tokens, part, before.contiguous(), found, rule=p.rule, norm=p.norm)
        outputs[begin : begin + length] = found[begin : begin + length]
        ends.append(before[0])
        maps.append(made[0])
        begin += length
    expected = torch.stack([ends[1], ends[0], ends[3], ends[2], ends[4]]), torch.stack([maps[1], maps[4]])
    assert relative_error(out, outputs) < 1e-12
    assert all(relative_error(*pair) < 1e-11 for pair in zip((kept, transitions), expected, strict=True))


@needs_interpreter
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "given"])
def test_rows_in_parts_are_walked_as_the_reference_does(
    stood_in: None, is_raw: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From slots of a pool, and transitions into one; what stands at places without a token shows nowhere."""
    from hypic_kernels.delta import carrying

    monkeypatch.setattr(carrying, "carry_config", lambda key_dim: CarryConfig(block, 4, 1))
    p = problem_of((265,), is_raw=is_raw)
    rows, wide, slots = in_parts(p), p.wide(), torch.tensor([3, 1], dtype=torch.int32)
    pool, where = torch.full((4, 4, 24, 24), math.nan), torch.tensor([2, 0], dtype=torch.int32)
    out = torch.full(p.v.shape, math.nan)
    spoiled = replace(p, v=p.v.index_fill(0, torch.tensor(0), math.nan)) if block == 16 else p
    kept, made = chunked.run(*spoiled.tokens, rows, (p.states, slots), p.rule, p.norm, out, (pool, where))
    assert made is pool and bool(pool[[1, 3]].isnan().all())
    expected = ran(wide, rows, wide.states[slots.long()], wide.norm)
    if spoiled is p:
        errors = [relative_error(*pair) for pair in zip((out, kept, pool[where.long()]), expected, strict=True)]
        assert max(errors) < 1e-5
        assert relative_error(kept.roll(1, 0), expected[1]) > 100 * 1e-5
    else:  # a token that is not finite stands in the first row alone
        assert bool(out[:8].isnan().any()) and relative_error(out[172:], expected[0][172:]) < 1e-5
        assert relative_error(kept[[2, 4]], expected[1][[2, 4]]) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_kept_is_settled_as_the_reference_does(state_dtype: torch.dtype) -> None:
    variant = SettleVariant(torch.device("cpu"), state_dtype, 40, 33)
    assert variant.measure() < (1e-6 if state_dtype == torch.float32 else 2**-8)


@needs_interpreter
def test_a_transition_that_is_forgotten_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypic_kernels.delta import carrying

    sound = carrying.settle
    monkeypatch.setattr(carrying, "settle", lambda kept, made, *rest: sound(kept, (made[0] * 0, made[1]), *rest))
    assert SettleVariant(torch.device("cpu"), torch.float32, 40, 33).measure() > 100 * 1e-5


@needs_interpreter
@pytest.mark.parametrize("fault", ["scale", "sums", "keys"])
def test_a_wrong_call_shows(stood_in: None, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hypic_kernels.delta import carrying, solving

    p, rows = problem_of(LENGTHS), Rows.of(LENGTHS, 2)
    if fault == "sums":
        monkeypatch.setattr(solving, "LOG2_E", 1.0)
    elif fault == "keys":
        sound = carrying.carry
        monkeypatch.setattr(carrying, "carry", lambda k, *rest, **options: sound(k / 2, *rest, **options))
    wide = p.wide()
    given = replace(p, rule=replace(p.rule, scale=2 * p.rule.scale)) if fault == "scale" else p
    slots = torch.arange(4, dtype=torch.int32)
    found = chunked.run(*given.tokens, rows, (initial_of(p, 4), slots), given.rule, None, out := torch.zeros_like(p.v))
    expected = ran(wide, rows, initial_of(p, 4).double())
    errors = [relative_error(one, other) for one, other in zip((out, *found), expected, strict=True)]
    assert max(errors) > 100 * 1e-5


def test_a_kernel_is_left_the_layout_that_is_nearest() -> None:
    """Below heuristics stands the autotuner; one that lists other layouts keeps what comes nearest."""

    class Config:
        def __init__(self, num_warps: int, num_stages: int, **kwargs: int) -> None:
            self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages

    class Kernel:
        def __init__(self, fn: Any = None, configs: Any = None) -> None:
            self.fn, self.configs = fn, configs

    listed = [Config(2, 2, BV=64), Config(4, 2, BV=32), Config(4, 3, BV=32), Config(4, 3, BV=64)]
    tuner = Kernel(Kernel(), listed)
    assert chunked.pin(Kernel(tuner, None), chunked.STATES) and tuner.configs == [listed[2]]
    small = Kernel(Kernel(), listed[:2])
    assert chunked.pin(small, chunked.STATES) and small.configs == [listed[1]]
    assert not chunked.pin(Kernel(), chunked.STATES)


@pytest.mark.gpu
def test_nothing_is_measured_at_first_use() -> None:
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_kernel_h_blockdim64 as kernel

    while not getattr(kernel, "configs", None):
        kernel = kernel.fn
    assert len(kernel.configs) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_only_bfloat16_on_a_gpu_is_for_fla() -> None:
    p, rows = problem_of(LENGTHS), Rows.of(LENGTHS)
    with pytest.raises(DeltaError, match="bfloat16 on a CUDA device"):
        ran(p, rows, initial_of(p, 4), backend="fla")
    assert not runs_here(2, 4, 24, 17, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"folds": torch.zeros(2, 3, dtype=torch.int32)}, "rows.folds"),
        ({"num_marks": 8}, "8 states before chunks are wanted; there are 7 chunks"),
        ({"tokens": torch.zeros(265)}, "rows.tokens is torch.float32"),
        ({"chunk_offsets": torch.zeros(3, dtype=torch.int32)}, "rows.chunk_offsets"),
        ({"cu_seqlens": torch.zeros(4, dtype=torch.int32)}, "rows.chunk_offsets"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rows_that_do_not_fit_are_refused(wrong: dict[str, Any], words: str) -> None:
    p = problem_of(LENGTHS)
    with pytest.raises(DeltaError, match=words):
        ran(p, replace(Rows.of(LENGTHS), **wrong), initial_of(p, 4))


def test_states_that_do_not_fit_are_refused() -> None:
    p = problem_of(LENGTHS)
    with pytest.raises(DeltaError, match="initial has shape"):
        ran(p, Rows.of(LENGTHS), initial_of(p, 3))
    with pytest.raises(DeltaError, match="initial must be contiguous"):
        ran(p, Rows.of(LENGTHS), initial_of(p, 8)[::2])


# -- on a GPU ----------------------------------------------------------------------------------------------------------

GPU_SHAPES = [(128, 128, 4, 8), (64, 64, 2, 2), (96, 192, 2, 4), (192, 192, 2, 2), (256, 256, 1, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_fla_gives_what_the_reference_gives(shape: tuple[int, int, int, int]) -> None:
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    lengths = (1, 700, 64, 129)
    p = Problem.random(Shape(*shape, 64, lengths, 0), dtype=torch.bfloat16, device="cuda")
    rows, initial, wide = Rows.of(lengths, 2, "cuda"), p.states[:4].contiguous(), p.wide()
    found = ran(p, rows, initial, p.norm, backend="fla")
    expected = ran(wide, rows, initial.double(), wide.norm)
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE["bf16"]
    # The control: another order of the rows' states must be far off.
    shifted = ran(p, rows, initial.roll(1, 0).contiguous(), p.norm, backend="fla")
    assert relative_error(shifted[0], expected[0]) > 10 * TOLERANCE["bf16"]


@pytest.mark.gpu
def test_fla_is_recorded_and_replayed_with_other_rows() -> None:
    """Nothing in a call asks the device."""
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    lengths = (300, 200)
    p = Problem.random(Shape(64, 64, 2, 4, 64, lengths, 0), dtype=torch.bfloat16, device="cuda")
    rows, initial = Rows.of(lengths, 1, "cuda"), p.states[:2].contiguous()
    ran(p, rows, initial, p.norm, backend="fla")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ran(p, rows, initial, p.norm, backend="fla")
    rows.tokens.copy_(rows.tokens.flip(0))
    graph.replay()
    for one, other in zip(recorded, ran(p, rows, initial, p.norm, backend="fla"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_the_self_check_passes_where_fla_is_right() -> None:
    if chunked.pieces() is None:
        pytest.skip("fla is not installed")
    variant = RunVariant(torch.device("cuda", 0), torch.bfloat16, 2, 4, 64, 64, True, True)
    assert variant.measure() < variant.tolerance


def test_a_rule_without_norm_is_run_too() -> None:
    p = problem_of((70,), is_raw=False)
    assert p.rule == Rule(scale=0.5) and not p.rule.normalise
    out, *_ = ran(p.wide(), Rows.of((70,)), initial_of(p, 1).double())
    assert relative_error(out, walked(p, (70,))[0]) < 1e-12
