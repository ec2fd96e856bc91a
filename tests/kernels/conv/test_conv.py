"""The short convolution against a loop over tokens and taps, reference and kernel alike."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.conv import NOTHING, Backend, Config, ConvError, convolve, tail_source
from hypic_kernels.conv.problem import Problem
from hypic_kernels.conv.sources import CANDIDATES, is_few
from hypic_kernels.trust import relative_error

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


def rows_of(lengths: tuple[int, ...], p: Problem, row: int) -> tuple[Tensor, range]:
    """All raw inputs of a row, history first, ``[W - 1 + L, C]``, and its tokens, as ``Problem`` lays them out."""
    start = sum(lengths[:row])
    tokens = range(start, start + lengths[row])
    history = p.tails[row].double() * (0.0 if row % 3 == 2 else 1.0)
    return torch.cat([history, p.x[start : tokens.stop].double()]).cpu(), tokens


def by_loop(lengths: tuple[int, ...], p: Problem, has_bias: bool, has_silu: bool) -> tuple[Tensor, Tensor]:
    """``out`` and tails, by row, token and tap."""
    weight, width = p.weight.double().cpu(), p.weight.shape[1]
    out = torch.zeros(len(p.sources), p.x.shape[1], dtype=F64)
    tails = p.tails.double().cpu()
    for row in range(len(lengths)):
        inputs, tokens = rows_of(lengths, p, row)
        for place, token in enumerate(tokens):
            out[token] = sum(weight[:, tap] * inputs[place + tap] for tap in range(width))
        tails[(row + 1) % len(lengths)] = inputs[len(inputs) - width + 1 :]
    out += p.bias.double().cpu() if has_bias else 0.0
    return out / (1 + (-out).exp()) if has_silu else out, tails


def check(p: Problem, lengths: tuple[int, ...], limit: float, backend: Backend, has_bias: bool = True,
          has_silu: bool = True, config: Config | None = None) -> None:  # fmt: skip
    out, scratch, tails = p.outputs()
    convolve(p.x, tails, p.sources, p.weight, bias=p.bias if has_bias else None, has_silu=has_silu, out=out,
             write_sources=p.write_sources, write_slots=p.write_slots, scratch=scratch, backend=backend,
             config=config)  # fmt: skip
    exact = by_loop(lengths, p, has_bias, has_silu)
    assert max(map(relative_error, (out.cpu(), tails.cpu()), exact)) < limit


BATCHES = [(5, 1, 0, 9, 2), (1,), (1, 1, 1, 1), (17,), (3, 2)]


@on_both
@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_rows_behind_histories(lengths: tuple[int, ...], width: int, backend: Backend) -> None:
    check(Problem.random(lengths, 20, width), lengths, 1e-6, backend)


@on_both
@pytest.mark.parametrize(("has_bias", "has_silu"), [(True, False), (False, True), (False, False)])
def test_options(has_bias: bool, has_silu: bool, backend: Backend) -> None:
    check(Problem.random(), (5, 1, 0, 9, 2), 1e-6, backend, has_bias, has_silu)


@needs_interpreter
@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_layout(config: Config) -> None:
    check(Problem.random(num_channels=130), (5, 1, 0, 9, 2), 1e-6, "triton", config=config)


@on_both
def test_without_tails_to_write(backend: Backend) -> None:
    p = Problem.random()
    kept = p.tails.clone()
    out = convolve(p.x, p.tails, p.sources, p.weight, backend=backend)
    assert relative_error(out, p.solve(False, False)[0]) < 1e-6 and torch.equal(p.tails, kept)


@on_both
def test_what_is_not_named_is_not_read(backend: Backend) -> None:
    """NaN in an input or a tail that no source names stays there."""
    p = Problem.random((4, 4))
    p.tails[2] = math.nan
    x = torch.cat([p.x, torch.full_like(p.x[:1], math.nan)])
    out = convolve(x, p.tails.clone(), p.sources, p.weight, backend=backend)
    assert bool(out.isfinite().all())
    assert not out[-1].any(), "padding should give zeros"


def test_sources() -> None:
    assert [tail_source(2, row, 4) for row in range(3)] == [-7, -8, -9]
    assert tail_source(2**29, 2, 4) > NOTHING


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": torch.ones(40, 3)},
        {"tails": torch.ones(6, 2, 40)},
        {"sources": torch.zeros(4, 4, dtype=torch.int64)},
        {"sources": torch.zeros(4, 3, dtype=torch.int32)},
        {"x": torch.ones(40, 17).T},
        {"bias": torch.ones(41)},
        {"write_slots": torch.zeros(3, dtype=torch.int32)},
        {"out": torch.ones(3, 40)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_tensors_that_do_not_fit(changed: dict[str, Tensor]) -> None:
    p = Problem.random()
    given = {"x": p.x, "tails": p.tails, "sources": p.sources, "weight": p.weight, "write_sources": p.write_sources}
    given["write_slots"] = p.write_slots
    convolve(**{**given, "tails": p.tails.clone()})  # type: ignore[arg-type]
    with pytest.raises(ConvError):
        convolve(**{**given, **changed})  # type: ignore[arg-type]


def test_errors_show() -> None:
    """Tails written before they are read, or a row behind the wrong slot, are far over what is allowed."""
    p = Problem.random()
    exact = p.solve()
    late = replace(p, tails=exact[1].float())
    shifted = p.sources.clone()
    shifted[(shifted < 0) & (shifted != NOTHING)] -= 3
    for wrong in (late, replace(p, sources=shifted)):
        assert max(map(relative_error, wrong.solve(), exact)) > 1e-3


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_layout_on_a_gpu(config: Config, dtype: torch.dtype) -> None:
    lengths = (300, 1, 0, 9, 2, 64)
    p = Problem.random(lengths, 1030, dtype=dtype, device="cuda")
    check(p, lengths, 1e-6 if dtype == F32 else 2**-8, "triton", config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lengths", [(1,), (1,) * 7, (3, 2), (7,)], ids=str)
def test_few_tokens_on_a_gpu(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """One launch: every slot that is written is another row's history, read by other threads."""
    for seed in range(20):
        p = Problem.random(lengths, 8192, dtype=dtype, device="cuda", seed=seed)
        assert is_few(len(p.sources), p.write_sources.numel())
        check(p, lengths, 1e-6 if dtype == F32 else 2**-8, "triton")


def test_how_few_tokens_are_one_launch() -> None:
    assert is_few(1, 3) and is_few(8, 32)
    assert not is_few(9, 3) and not is_few(8, 33) and not is_few(1, 0) and not is_few(0, 3)


@pytest.mark.gpu
def test_types_may_differ_on_a_gpu() -> None:
    p = Problem.random(dtype=BF16, tail_dtype=F32, weight_dtype=F32, device="cuda")
    check(p, (5, 1, 0, 9, 2), 2**-8, "triton")


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_tables() -> None:
    p, other = Problem.random((8, 9, 0), 256, device="cuda"), Problem.random((3, 0, 14), 256, device="cuda", seed=1)
    out, _, tails = p.outputs()
    tables = {"write_sources": p.write_sources, "write_slots": p.write_slots}
    convolve(p.x, tails, p.sources, p.weight, **tables, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        convolve(p.x, tails, p.sources, p.weight, **tables, out=out)
    p.sources.copy_(other.sources)
    p.write_sources.copy_(other.write_sources)
    out.fill_(math.nan)
    tails.copy_(p.tails)
    graph.replay()
    torch.cuda.synchronize()
    assert max(map(relative_error, (out, tails), p.solve(False, False))) < 1e-6
