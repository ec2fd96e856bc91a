"""How fla's pieces are called for rows that carry their state: in order, in parts, and settled as the reference does.

fla itself runs on a GPU alone; here pieces in plain torch, of the meaning that is relied on, stand in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic_kernels.delta import chunked, run
from hypic_kernels.delta.check import SettleVariant
from hypic_kernels.delta.layout import CarryConfig
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.rows import Rows
from hypic_kernels.trust import relative_error
from tests.kernels.delta.oracle import needs_interpreter
from tests.kernels.delta.running import initial_of, problem_of, ran

LENGTHS = (70, 64, 1, 130)


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
