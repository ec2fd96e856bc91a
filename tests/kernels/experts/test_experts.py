"""Routing, sorting and combining against loops over tokens, reference and kernel alike."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.experts import Backend, ExpertsError, combine, order, route, scatter
from hypic_kernels.experts.check import OrderVariant, Variant
from hypic_kernels.trust import relative_error

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]
on_both = pytest.mark.parametrize("backend", BACKENDS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@on_both
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num", "num_experts", "top_k"), [(7, 5, 2), (1, 256, 8), (33, 64, 1), (3, 6, 6)])
def test_the_best_are_chosen(num: int, num_experts: int, top_k: int, renormalise: bool, backend: Backend) -> None:
    logits = draw(num, num_experts)
    weights, chosen = route(logits, top_k, renormalise=renormalise, backend=backend)
    for row in range(num):
        powers = [float(power) for power in logits[row].double().exp()]
        best = sorted(range(num_experts), key=lambda e: -powers[e])[:top_k]
        divisor = sum(powers[e] for e in best) if renormalise else sum(powers)
        assert chosen[row].tolist() == best
        assert weights[row].tolist() == pytest.approx([powers[e] / divisor for e in best], rel=1e-5)
    spoiled, _ = route(logits + draw(num, num_experts, seed=3) * 0.1, top_k, renormalise=False, backend=backend)
    assert relative_error(spoiled, route(logits, top_k, renormalise=False, backend=backend)[0]) > 1e-3


@on_both
def test_ties_and_sick_rows(backend: Backend) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    logits[2, 7] = float("-inf")
    weights, chosen = route(logits, 4, backend=backend)
    assert chosen[0].tolist() == [0, 1, 2, 3] and weights[0].tolist() == pytest.approx([0.25] * 4)
    assert bool(weights[1].isnan().all()) and len(set(chosen[1].tolist())) == 4
    assert all(0 <= e < 10 for e in chosen[1].tolist()) and 7 not in chosen[2].tolist()


@on_both
@pytest.mark.parametrize(("num", "width", "num_experts", "top_k"), [(9, 12, 5, 2), (40, 2100, 3, 1), (1, 3, 256, 8)])
def test_rows_stand_by_expert(num: int, width: int, num_experts: int, top_k: int, backend: Backend) -> None:
    wide = draw(num, width + 5)
    x = wide[:, :width]
    chosen = draw(num, num_experts, seed=1).argsort(dim=1)[:, :top_k].to(torch.int32)
    rows, places, ends = scatter(x, chosen, num_experts, backend=backend)
    assert sorted(places.flatten().tolist()) == list(range(num * top_k))
    for token in range(num):
        for slot, expert in enumerate(chosen[token].tolist()):
            place = int(places[token, slot])
            assert (int(ends[expert - 1]) if expert else 0) <= place < int(ends[expert])
            assert torch.equal(rows[place], x[token])


@on_both
@pytest.mark.parametrize(
    ("num", "num_experts", "top_k"),
    [(9, 5, 2), (1, 256, 8), (1, 1, 1), (70, 3, 3), (257, 40, 8), (0, 4, 2), (9000, 7, 1)],
)
def test_order_names_the_rows_that_scatter_copies(num: int, num_experts: int, top_k: int, backend: Backend) -> None:
    """The last has so many rows that they are scattered."""
    chosen = draw(num, num_experts, seed=1).argsort(dim=1)[:, :top_k].to(torch.int32).contiguous()
    tokens, places, ends = order(chosen, num_experts, backend=backend)
    assert {tensor.dtype for tensor in (tokens, places, ends)} == {torch.int32}
    counts = [int((chosen == expert).sum()) for expert in range(num_experts)]
    assert ends.tolist() == [sum(counts[: expert + 1]) for expert in range(num_experts)]
    assert sorted(places.flatten().tolist()) == list(range(num * top_k))
    assert bool((tokens[places.long()] == torch.arange(num)[:, None]).all())
    assert bool((torch.searchsorted(ends, places, right=True) == chosen).all())


@on_both
@pytest.mark.parametrize("kind", ["experts", "shared", "gated"])
@pytest.mark.parametrize(("num", "width", "top_k"), [(5, 16, 2), (3, 1500, 8), (1, 1, 1)])
def test_rows_are_added_up(num: int, width: int, top_k: int, kind: str, backend: Backend) -> None:
    rows, weights, x, gate = draw(num * top_k, width), draw(num, top_k, seed=1), draw(num, 24, seed=2), draw(24, seed=3)
    places = draw(num * top_k, seed=4).argsort().view(num, top_k).to(torch.int32)
    shared = None if kind == "experts" else draw(num, width, seed=5)
    given = {"shared": shared, "x": x if kind == "gated" else None, "gate": gate if kind == "gated" else None}
    exact = torch.zeros(num, width, dtype=F64)
    for n in range(num):
        for j in range(top_k):
            exact[n] += float(weights[n, j]) * rows[int(places[n, j])].double()
        if shared is not None:
            asked = sum(float(a) * float(b) for a, b in zip(x[n], gate, strict=True))
            exact[n] += shared[n].double() * (1 / (1 + 2.718281828459045**-asked) if kind == "gated" else 1.0)
    assert relative_error(combine(rows, places, weights, backend=backend, **given), exact) < 1e-5
    wrong = combine(rows, places, weights * 1.01, backend=backend, **given)
    assert relative_error(wrong, exact) > 1e-3


def test_what_does_not_fit_is_said() -> None:
    x, chosen = draw(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    for call in (
        lambda: route(x, 9),
        lambda: route(draw(2, 2000), 2),
        lambda: scatter(x, chosen.long(), 3),
        lambda: scatter(x[:3], chosen, 3),
        lambda: order(chosen.long(), 3),
        lambda: order(chosen.T, 3),
        lambda: combine(x, chosen, torch.ones(4, 2)),
        lambda: combine(draw(8, 8), chosen, torch.ones(4, 2), shared=draw(4, 7)),
        lambda: combine(draw(8, 8), chosen, torch.ones(4, 2), gate=draw(8)),
    ):
        with pytest.raises(ExpertsError):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8])
def test_kernels_on_a_gpu(top_k: int, dtype: torch.dtype) -> None:
    variant = Variant(torch.device("cuda"), dtype, top_k)
    assert variant.measure() <= variant.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8])
def test_order_on_a_gpu(top_k: int) -> None:
    assert OrderVariant(torch.device("cuda"), top_k).measure() == 0
    chosen = draw(9000, 50, seed=1).argsort(dim=1)[:, :top_k].to(torch.int32).contiguous().cuda()
    for rows in (chosen, chosen[:800]):
        tokens, places, ends = order(rows, 50, backend="triton")
        assert torch.equal(ends, order(rows, 50, backend="reference").ends)
        assert bool((tokens[places.long()] == torch.arange(len(rows), device="cuda")[:, None]).all())
        assert bool((torch.searchsorted(ends, places, right=True) == rows).all())
