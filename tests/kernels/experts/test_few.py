"""Experts of few tokens against sums written out pair by pair, reference and kernel alike."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.experts import Backend, ExpertsError, route
from hypic_kernels.experts.check import FewVariant
from hypic_kernels.experts.few import Chosen, Scores, answer, takes_few
from hypic_kernels.experts.layout import FEW, Few, Shared, choose_few, is_few
from hypic_kernels.trust import relative_error

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]
on_both = pytest.mark.parametrize("backend", BACKENDS)
# Tokens, experts, experts a token, channels of a token, of an expert and of the shared one.
SIZES = [(1, 9, 3, 37, 11, 11), (3, 5, 2, 24, 9, 20), (2, 6, 6, 16, 8, 5), (2, 40, 1, 33, 6, 0)]
by_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(sizes: tuple[int, ...], is_gated: bool, has_gate: bool = True) -> tuple[Tensor, Tensor, Shared | None]:
    _, num_experts, _, width, inner, shared_inner = sizes
    into = draw(num_experts, inner * (2 if is_gated else 1), width, seed=1) / width**0.5
    back = draw(num_experts, width, inner, seed=2) / inner**0.5
    if not shared_inner:
        return into, back, None
    gate = draw(width, seed=6) if has_gate else None
    first, up = (draw(shared_inner, width, seed=seed) / width**0.5 for seed in (3, 4))
    return into, back, Shared(first, up, draw(width, shared_inner, seed=5), gate)


def block(x: Tensor, first: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
    """Of one token, in float64: gated by ``first``, or squared behind a relu."""
    x, up, down = x.double(), up.double(), down.double()
    if first is None:
        return down @ (up @ x).clamp(min=0) ** 2
    gate = first.double() @ x
    return down @ (gate / (1 + (-gate).exp()) * (up @ x))


def written_out(
    x: Tensor, into: Tensor, back: Tensor, weights: Tensor, chosen: Tensor, shared: Shared | None, is_gated: bool
) -> Tensor:
    out = torch.zeros(len(x), back.shape[1], dtype=F64)
    for n, row in enumerate(x):
        for weight, expert in zip(weights[n].tolist(), chosen[n].tolist(), strict=True):
            first, up = into[expert].chunk(2) if is_gated else (None, into[expert])
            out[n] += weight * block(row, first, up, back[expert])
        if shared is not None:
            factor = 1.0 if shared.gate is None else float((row.double() @ shared.gate.double()).sigmoid())
            out[n] += factor * block(row, shared.first if is_gated else None, shared.up, shared.down)
    return out


@on_both
@by_sizes
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_the_answer_is_the_written_out_sum(
    sizes: tuple[int, ...], is_gated: bool, has_gate: bool, backend: Backend
) -> None:
    num, num_experts, top_k, width, *_ = sizes
    x = draw(num, 2 * width)[:, :width]
    into, back, shared = matrices(sizes, is_gated, has_gate)
    weights, chosen = route(draw(num, num_experts, seed=7), top_k)
    exact = written_out(x, into, back, weights, chosen, shared, is_gated)
    routed = Chosen(weights, chosen)
    found = answer(x, into, back, routed, shared=shared, is_gated=is_gated, backend=backend)
    assert found.shape == exact.shape and relative_error(found, exact) < 1e-5
    residual = draw(num, 3 * width, seed=8)[:, :width]
    added = answer(x, into, back, routed, shared=shared, residual=residual, is_gated=is_gated, backend=backend)
    assert relative_error(added, exact + residual) < 1e-5
    wrong = Chosen(weights * 1.01, chosen)
    assert relative_error(answer(x, into, back, wrong, shared=shared, is_gated=is_gated, backend=backend), exact) > 1e-3


@on_both
@by_sizes
@pytest.mark.parametrize("renormalise", [True, False])
def test_scores_choose_as_route_does(sizes: tuple[int, ...], renormalise: bool, backend: Backend) -> None:
    num, num_experts, top_k, width, *_ = sizes
    x, logits = draw(num, width), draw(num, 2 * num_experts, seed=7)[:, :num_experts]
    into, back, shared = matrices(sizes, True)
    weights, chosen = route(logits.contiguous(), top_k, renormalise=renormalise)
    exact = written_out(x, into, back, weights, chosen, shared, True)
    found = answer(x, into, back, Scores(logits, top_k, renormalise), shared=shared, backend=backend)
    assert relative_error(found, exact) < 1e-5
    if top_k < num_experts:
        wrong = Scores(-logits, top_k, renormalise)
        assert relative_error(answer(x, into, back, wrong, shared=shared, backend=backend), exact) > 1e-3


@on_both
def test_many_experts_are_chosen_from(backend: Backend) -> None:
    sizes = (1, 256, 8, 16, 4, 4)
    test_scores_choose_as_route_does(sizes, True, backend)


@on_both
def test_ties_take_the_lower_number_and_sick_rows_stay_alone(backend: Backend) -> None:
    sizes = (3, 10, 4, 16, 8, 8)
    into, back, shared = matrices(sizes, True)
    x, logits = draw(3, 16), torch.zeros(3, 10)
    logits[1, 4], logits[2, 7] = torch.nan, -torch.inf
    into[5:], back[8] = torch.nan, torch.inf
    found = answer(x, into, back, Scores(logits, 4, True), shared=shared, backend=backend)
    chosen = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    exact = written_out(x[[0, 2]], into, back, torch.full((2, 4), 0.25), chosen.expand(2, 4), shared, True)
    assert relative_error(found[[0, 2]], exact) < 1e-5 and bool(found[1].isnan().all())


@needs_interpreter
@by_sizes
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    ("into", "back"), [(Few(4, 16, 1, 4), Few(2, 4, 1, 4, 8)), (Few(2, 64, 3, 1), Few(8, 512, 1, 1, 1))]
)
def test_layouts_in_the_interpreter(sizes: tuple[int, ...], is_gated: bool, into: Few, back: Few) -> None:
    _, num_experts, top_k, *widths = sizes
    device, three = torch.device("cpu"), (widths[0], widths[1], widths[2])
    variant = FewVariant(device, F32, num_experts, top_k, three, num_experts % 2 == 0, is_gated, into, back)
    assert variant.measure() <= variant.tolerance


def test_how_few_is_said_by_a_table() -> None:
    most = FEW[-1][0]
    assert is_few(1) and is_few(most) and not is_few(most + 1) and most < 16
    assert [size for size, *_ in FEW] == sorted(size for size, *_ in FEW)
    assert choose_few(1, BF16) == FEW[0][1:] and choose_few(most, BF16) == FEW[-1][1:]
    assert choose_few(1, F32)[0].block_k * 2 == choose_few(1, BF16)[0].block_k
    into, back, shared = matrices(SIZES[0], True)
    assert not takes_few(draw(1, 37), into, back, 3, shared=shared)  # a CPU has no kernels


def test_what_does_not_fit_is_said() -> None:
    into, back, shared = matrices((2, 5, 2, 16, 8, 8), True)
    assert shared is not None
    x, routed = draw(2, 16), Chosen(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int32))
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: answer(draw(2, 15), into, back, routed),
        lambda: answer(x, into[:, :7], back, routed),
        lambda: answer(x, into, back[:4], routed),
        lambda: answer(x, into.half(), back, routed),
        lambda: answer(x[:1], into, back, routed),
        lambda: answer(x, into, back, routed, residual=draw(1, 16)),
        lambda: answer(x, into, back, routed, residual=x.half()),
        lambda: answer(x, into, back, Chosen(torch.ones(2, 3), routed.experts)),
        lambda: answer(x, into, back, Chosen(torch.ones(2, 2), routed.experts.long())),
        lambda: answer(x, into, back, Scores(draw(2, 4), 2, True)),
        lambda: answer(x, into, back, Scores(draw(2, 5), 6, True)),
        lambda: answer(x, into, back, routed, shared=shared._replace(up=draw(8, 15))),
        lambda: answer(x, into, back, routed, shared=shared._replace(down=shared.down.half())),
    )
    for call in calls:
        with pytest.raises(ExpertsError):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("widths", [(2048, 512, 512), (200, 72, 0), (1000, 250, 130)], ids=str)
def test_few_on_a_gpu(widths: tuple[int, int, int], is_gated: bool, dtype: torch.dtype) -> None:
    for num in (1, FEW[-1][0]):
        for num_experts, top_k in ((256, 8), (7, 3), (512, 10)):
            sizes = choose_few(num, dtype)
            variant = FewVariant(torch.device("cuda"), dtype, num_experts, top_k, widths, True, is_gated, *sizes)
            assert variant.measure() <= variant.tolerance
