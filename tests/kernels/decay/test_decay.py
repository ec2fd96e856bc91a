"""Rows with one decay a head: the reference against the loop over tokens, the kernels against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.decay import TOLERANCE, DecayError, Precision, run, runs_here
from hypic_kernels.decay.check import LENGTHS, Problem, Variant
from hypic_kernels.rows import Rows
from hypic_kernels.trust import relative_error

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
BF16, F32 = torch.bfloat16, torch.float32


def walked(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """One token after the other, in float64."""
    q, k, v, g = (tensor.double() for tensor in p[:4])
    outputs, finals, decays = torch.empty_like(v), [], []
    bounds, group = p.rows.cu_seqlens.tolist(), v.shape[1] // k.shape[1]
    for row, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state, decay = p.initial[row].double(), torch.ones(v.shape[1], dtype=torch.float64)
        for token in p.rows.tokens[first:end].tolist():
            a = g[token].exp()
            key = k[token].repeat_interleave(group, 0)
            state, decay = a[:, None, None] * state + key[:, :, None] * v[token][:, None, :], a * decay
            outputs[token] = (q[token].repeat_interleave(group, 0)[:, None, :] @ state)[:, 0]
        finals.append(state)
        decays.append(decay)
    return outputs, torch.stack(finals), torch.stack(decays)


def ran(p: Problem, **options: Any) -> tuple[Tensor, ...]:
    """Outputs, final states, decays; what is not written is NaN."""
    out = torch.full(p.v.shape, math.nan, dtype=options.pop("dtype", p.v.dtype), device=p.v.device)
    return out, *run(*p, out, **options)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    return max(relative_error(one, other) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=str)
def test_the_reference_equals_tokens_one_after_the_other(heads: tuple[int, int]) -> None:
    p = Problem.random((24, 17), heads)
    wide = Problem(*(tensor.double() for tensor in p[:4]), p.rows, p.initial.double())
    assert errors(ran(wide), walked(p)) < 1e-12


@needs_interpreter
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (80, 40), (5, 3), (1, 1), (128, 70)], ids=str)
def test_heads_of_any_size(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    p = Problem.random(dims, heads, (66, 1))
    assert errors(ran(p, backend="triton", precision="ieee"), p.solve()) < 3e-6


@needs_interpreter
@pytest.mark.parametrize("lengths", [(1,), (64,), (63, 64, 65), LENGTHS], ids=str)
def test_rows_around_a_chunk(lengths: tuple[int, ...]) -> None:
    p = Problem.random((8, 8), (1, 1), lengths)
    assert errors(ran(p, backend="triton", precision="ieee"), p.solve()) < 3e-6


@needs_interpreter
def test_a_strong_decay_does_not_blur_what_follows() -> None:
    p = Problem.random((8, 8), (1, 1), (64,))
    gates = p.g.clone()
    gates[2] = -30000.0
    strong = p._replace(g=gates)
    assert errors(ran(strong, backend="triton", precision="ieee"), strong.solve()) < 3e-6


@needs_interpreter
def test_what_is_left_out_shows() -> None:
    """The control: other states, other gates, or rows that are cut elsewhere."""
    p, exact = Problem.random((16, 16), (1, 2), (70, 65)), Problem.random((16, 16), (1, 2), (70, 65)).solve()
    assert errors(ran(p, backend="triton", precision="ieee"), exact) < 3e-6
    wrong = [p._replace(initial=p.initial * 0), p._replace(g=p.g * 0), p._replace(rows=Rows.of((71, 64)))]
    for spoiled in wrong:
        assert errors(ran(spoiled, backend="triton", precision="ieee"), exact) > 100 * 3e-6


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_rows_name_tokens_in_any_order_and_others_are_left(backend: str) -> None:
    p = Problem.random((16, 16), (1, 2), (200,))
    tokens = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:134].to(torch.int32)
    picked = Problem(*(tensor[tokens.long()] for tensor in p[:4]), Rows.of((70, 64)), p.initial.repeat(2, 1, 1, 1))
    named = p._replace(rows=replace(Rows.of((70, 64)), tokens=tokens), initial=picked.initial)
    out, *rest = ran(named, backend=backend, precision="ieee")
    assert errors((out[tokens.long()], *rest), picked.solve()) < 3e-6
    assert int(out.isnan().all(-1).all(-1).sum()) == 66


@needs_interpreter
def test_views_and_one_gate_for_all_tokens() -> None:
    p = Problem.random((16, 16), (2, 2), (70,))
    wide = torch.cat([p.q, p.k, p.v], dim=1)
    q, k, v = wide.chunk(3, dim=1)
    viewed = Problem(q, k, v, p.g[:1].expand(70, -1), p.rows, p.initial)
    assert errors(ran(viewed, backend="triton", precision="ieee"), viewed.solve()) < 3e-6


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"g": torch.zeros(3, 2)}, "g has shape"),
        ({"initial": torch.zeros(1, 2, 16, 16)}, "initial has shape"),
        ({"k": torch.zeros(264, 3, 16)}, "Hk dividing Hv"),
        ({"v": torch.zeros(264, 2, 32)[..., ::2]}, "stride 2"),
        ({"initial": torch.zeros(4, 2, 16, 32)[..., ::2]}, "must be contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Tensor], words: str) -> None:
    with pytest.raises(DecayError, match=words):
        ran(Problem.random((16, 16))._replace(**wrong))


def test_a_cpu_has_no_kernel_of_its_own() -> None:
    assert not runs_here(16, 16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", list(TOLERANCE))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (128, 64), (64, 64), (256, 64), (96, 96), (1, 1)], ids=str)
def test_the_kernels_are_right_on_a_gpu(dims: tuple[int, int], dtype: torch.dtype, precision: Precision) -> None:
    variant = Variant(torch.device("cuda", 0), dtype, dtype, 2, *dims, precision)
    assert variant.measure() < variant.tolerance


@pytest.mark.gpu
def test_many_rows_on_a_gpu() -> None:
    p = Problem.random((128, 128), (4, 4), (1024,) * 8 + (3000, 5), device="cuda")
    assert errors(ran(p), p.solve()) < 3e-5
