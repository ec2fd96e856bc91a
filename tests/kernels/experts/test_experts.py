"""Routing, sorting and combining against loops over tokens, reference and kernel alike."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.experts import Backend, ExpertsError, combine, order, route, route_groups, scatter
from hypic_kernels.experts.check import GroupsVariant, OrderVariant, Variant
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


GROUPED = [(256, 8, 8, 4), (24, 3, 4, 2), (30, 6, 1, 1), (21, 4, 7, 2), (6, 2, 3, 1), (64, 1, 1, 1)]
by_groups = pytest.mark.parametrize(("num_experts", "top_k", "num_groups", "top_groups"), GROUPED)


@on_both
@by_groups
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_best_of_the_best_groups_are_chosen(
    num_experts: int, top_k: int, num_groups: int, top_groups: int, has_bias: bool, backend: Backend
) -> None:
    logits, bias = draw(7, num_experts), draw(num_experts, seed=1) if has_bias else None
    groups: dict[str, int] = {"num_groups": num_groups, "top_groups": top_groups}
    weights, chosen = route_groups(logits, top_k, bias=bias, scale=2.5, backend=backend, **groups)  # type: ignore[arg-type]
    size = num_experts // num_groups
    for row in range(len(logits)):
        scores = (1 / (1 + (-logits[row].double()).exp())).tolist()
        biased = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
        opened = sorted(range(num_groups), key=lambda g: -worth[g])[:top_groups]
        best = sorted((e for e in range(num_experts) if e // size in opened), key=lambda e: -biased[e])[:top_k]
        total = sum(scores[e] for e in best)
        assert chosen[row].tolist() == best
        assert weights[row].tolist() == pytest.approx([2.5 * scores[e] / total for e in best], rel=1e-5)
    plain, _ = route_groups(logits, top_k, bias=bias, renormalise=False, backend=backend, **groups)
    assert relative_error(plain / plain.sum(1, keepdim=True) * 2.5, weights.double()) < 1e-6


@on_both
def test_ties_and_sick_rows_of_groups(backend: Backend) -> None:
    logits = torch.zeros(3, 12)
    logits[1, 4] = float("nan")
    logits[2, 7] = float("-inf")
    weights, chosen = route_groups(logits, 4, num_groups=3, top_groups=2, backend=backend)
    assert chosen[0].tolist() == [0, 1, 2, 3] and weights[0].tolist() == pytest.approx([0.25] * 4)
    assert bool(weights[1].isnan().all()) and len(set(chosen[1].tolist())) == 4
    assert all(0 <= e < 12 for e in chosen[1].tolist()) and 7 not in chosen[2].tolist()


def test_groups_that_cannot_be() -> None:
    logits = torch.zeros(2, 12)
    for wrong in ({"num_groups": 5}, {"num_groups": 12}, {"num_groups": 3, "top_groups": 4}, {"num_groups": 6},
                  {"bias": torch.zeros(11)}):  # fmt: skip
        with pytest.raises(ExpertsError):
            route_groups(logits, 3, **wrong)


@pytest.mark.gpu
@by_groups
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_groups_on_a_gpu(dtype: torch.dtype, num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    for bias_dtype in (None, F32, dtype):
        variant = GroupsVariant(torch.device("cuda"), dtype, bias_dtype, num_experts, top_k, num_groups, top_groups)
        assert variant.measure() <= variant.tolerance


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
    residual = draw(num, 2 * width, seed=6)[:, :width]
    added = combine(rows, places, weights, residual=residual, backend=backend, **given)
    assert relative_error(added, exact + residual) < 1e-5


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
