"""Experts and routers against sums written out token by token; the grouped product against the experts in turn."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from hypic.engine.layers import moe
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.moe import Experts, MoE, UngatedExperts, grouped_product
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.routers import SigmoidRouter, SoftmaxRouter
from hypic_kernels.matvec import normed_product

HIDDEN, WIDTH, EXPERTS, TOP_K = 32, 24, 8, 3


M = TypeVar("M", bound=nn.Module)


def filled(module: M, dtype: torch.dtype = torch.float64) -> M:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = (0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)).to(dtype)
    return module.requires_grad_(False)


def tokens(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def one_expert(experts: Experts, number: int, x: Tensor) -> Tensor:
    gate, up = experts.gate_up_proj[number, :WIDTH] @ x, experts.gate_up_proj[number, WIDTH:] @ x
    return experts.down_proj[number] @ (gate * torch.sigmoid(gate) * up)


def written_out(experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    rows = [
        torch.stack([w * one_expert(experts, int(e), row) for w, e in zip(ws, es, strict=True)]).sum(0)
        for row, ws, es in zip(x, weights, chosen, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("count", [1, 2, 19])
def test_experts_equal_the_written_out_sum(count: int) -> None:
    experts, x = filled(Experts(EXPERTS, HIDDEN, WIDTH)), tokens(count)
    weights, chosen = filled(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN))(x)
    expected = written_out(experts, x, weights, chosen)
    assert torch.allclose(experts(x, weights, chosen), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(experts(x, weights, chosen.flip(1)), expected, rtol=1e-3)


def test_no_tokens_give_nothing() -> None:
    for router in (SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), SigmoidRouter(EXPERTS, TOP_K, HIDDEN, num_groups=4)):
        assert filled(MoE(router, Experts(EXPERTS, HIDDEN, WIDTH)))(tokens(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("zero_centred", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_few_tokens_take_another_way_to_the_same_answer(
    router: str, has_shared: bool, zero_centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of decode steps, on the references of its kernels."""
    gate: SoftmaxRouter | SigmoidRouter = SoftmaxRouter(EXPERTS, TOP_K, HIDDEN)
    if router == "sigmoid":
        gate = SigmoidRouter(EXPERTS, TOP_K, HIDDEN, num_groups=4, top_groups=2, scale=2.5)
    shared = (SwiGLU(HIDDEN, 40), nn.Linear(HIDDEN, 1, bias=False)) if has_shared else ()
    layer = filled(MoE(gate, Experts(EXPERTS, HIDDEN, WIDTH), *shared))
    norm = filled(RMSNorm(HIDDEN, 1e-6, zero_centred=zero_centred))
    x, added = tokens(3), tokens(6)[3:]
    expected = x + added + layer(norm(x + added))
    assert torch.allclose(layer.behind(norm, x, added), expected, rtol=1e-12, atol=1e-12)
    calls: list[str] = []
    answer = Experts.answer

    def product(*given: Any, **options: Any) -> Any:
        calls.append("multiplied")
        return normed_product(*given, **options)

    def answered(*given: Any) -> Tensor:
        calls.append("answered")
        return answer(*given)

    few = SimpleNamespace(takes_normed=lambda *_, **__: True, normed_product=product)
    monkeypatch.setattr(moe, "matvec", few)
    for name, value in (("takes_few", lambda *_: True), ("asks_no_host", lambda *_: True), ("answer", answered)):
        monkeypatch.setattr(Experts, name, value)
    found = layer.behind(norm, x, added)
    assert calls == (["multiplied", "answered"] if router == "softmax" else ["answered"])
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    spoiled = layer.behind(norm, x, 1.01 * added)
    assert not torch.allclose(spoiled, expected, rtol=1e-3)


def test_a_tokens_experts_do_not_depend_on_its_neighbours() -> None:
    moe = filled(MoE(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), Experts(EXPERTS, HIDDEN, WIDTH)))
    x = tokens(20)
    alone = torch.cat([moe(x[n : n + 1]) for n in range(20)])
    assert torch.allclose(moe(x), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_product_equals_experts_in_turn(dtype: torch.dtype) -> None:
    """torch's grouped product runs on a CPU too, only slower; expert 5 is left without a token."""
    product = grouped_product()
    assert product is not None
    experts, x = filled(Experts(EXPERTS, HIDDEN, WIDTH), dtype), tokens(17, dtype)
    ends = torch.tensor([0, 3, 4, 4, 9, 9, 16, 17])
    grouped, in_turn = experts.run_grouped(x, ends, product), experts.run_in_turn(x, ends)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert float((grouped - in_turn).abs().max() / in_turn.abs().max()) < tolerance
    shifted = experts.run_grouped(x, ends.roll(1), product)
    assert float((shifted - in_turn).abs().max() / in_turn.abs().max()) > 10 * tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 300])
def test_grouped_product_on_a_gpu(count: int) -> None:
    dtype = torch.bfloat16
    moe = filled(MoE(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), Experts(EXPERTS, HIDDEN, WIDTH)), dtype).cuda()
    x = tokens(count, dtype).cuda()
    assert moe.experts.can_group(x) and grouped_product() is not None
    grouped = moe(x)
    weights, chosen = moe.gate(x)
    expected = written_out(moe.experts.double(), x.double(), weights.double(), chosen)
    assert float((grouped.double() - expected).abs().max() / expected.abs().max()) < 2e-2


def test_softmax_weights() -> None:
    x = tokens(9)
    for renormalise in (True, False):
        router = filled(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN, renormalise=renormalise))
        weights, chosen = router(x)
        p = torch.softmax(x @ router.weight.T, dim=-1)
        assert torch.equal(chosen, p.argsort(dim=-1, descending=True)[:, :TOP_K])
        expected = p.gather(1, chosen)
        expected = expected / expected.sum(1, keepdim=True) if renormalise else expected
        assert torch.allclose(weights, expected, rtol=1e-12)


def _sigmoid_choice(router: SigmoidRouter, x: Tensor) -> tuple[list[int], list[float]]:
    scores = torch.sigmoid(router.weight @ x).tolist()
    bias = [0.0] * EXPERTS if router.expert_bias is None else router.expert_bias.tolist()
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = EXPERTS // router.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
    best = sorted(groups, key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))[: router.top_groups]
    chosen = sorted((e for group in best for e in group), key=lambda e: -biased[e])[:TOP_K]
    return chosen, [router.scale * scores[e] / sum(scores[c] for c in chosen) for e in chosen]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (2, 1)])
def test_sigmoid_choice(num_groups: int, top_groups: int, has_bias: bool) -> None:
    options = {"num_groups": num_groups, "top_groups": top_groups, "scale": 2.5, "has_bias": has_bias}
    router = filled(SigmoidRouter(EXPERTS, TOP_K, HIDDEN, **options))  # type: ignore[arg-type]
    x = tokens(40)
    weights, chosen = router(x)
    found = [_sigmoid_choice(router, row) for row in x]
    assert chosen.tolist() == [experts for experts, _ in found]
    assert torch.allclose(weights, torch.tensor([w for _, w in found], dtype=torch.float64), rtol=1e-12)
    if router.expert_bias is not None:
        router.expert_bias.zero_()
        assert router(x)[1].tolist() != chosen.tolist(), "the bias must matter for this to test it"


def test_a_negative_bias_never_opens_a_closed_group() -> None:
    router = filled(SigmoidRouter(EXPERTS, 2, HIDDEN, num_groups=4, top_groups=1))
    assert router.expert_bias is not None
    router.expert_bias.fill_(-5.0)
    groups = router(tokens(30))[1] // 2
    assert bool((groups[:, 0] == groups[:, 1]).all())


@pytest.mark.parametrize("gated", [True, False])
def test_shared_expert(gated: bool) -> None:
    shared, gate = SwiGLU(HIDDEN, 20), nn.Linear(HIDDEN, 1, bias=False) if gated else None
    moe = filled(MoE(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), Experts(EXPERTS, HIDDEN, WIDTH), shared, gate))
    x = tokens(5)
    added = moe(x) - moe.experts(x, *moe.gate(x))
    expected = shared(x) * (torch.sigmoid(gate(x)) if gate is not None else 1.0)
    assert torch.allclose(added, expected, rtol=1e-9, atol=1e-12)


def test_the_loop_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off CUDA the experts run in turn; without a grouped product in torch nothing is grouped."""
    moe = filled(MoE(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), Experts(EXPERTS, HIDDEN, WIDTH)))
    x, taken = tokens(6), list[str]()
    _count(monkeypatch, "run_in_turn", taken)
    _count(monkeypatch, "run_grouped", taken)
    moe(x)
    assert taken == ["run_in_turn"] and not moe.experts.asks_no_host(x)
    on_a_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert moe.experts.can_group(on_a_gpu)
    monkeypatch.setattr("hypic.engine.layers.moe.grouped_product", lambda: None)
    assert not moe.experts.can_group(on_a_gpu)


@pytest.mark.parametrize("kind", [Experts, UngatedExperts])
@pytest.mark.parametrize(
    ("count", "groups", "multiplies", "grouped"),
    [(6, False, True, 0), (90, False, True, 0), (6, True, True, 0), (90, True, True, 1), (6, True, False, 1)],
)
def test_few_rows_are_multiplied_and_many_grouped(
    kind: type[Experts], count: int, groups: bool, multiplies: bool, grouped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With references in the place of kernels; 90 tokens are 270 rows of 8 experts."""
    experts, x = filled(kind(EXPERTS, HIDDEN, WIDTH), torch.float32), tokens(count, torch.float32)
    router, taken = filled(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), torch.float32), list[str]()
    moe = MoE(router, experts, filled(SwiGLU(HIDDEN, 20), torch.float32))
    expected, expected_routed = moe(x), experts(x, *router(x))
    monkeypatch.setattr(Experts, "can_group", lambda self, x: groups)
    monkeypatch.setattr(Experts, "can_multiply", lambda self, x: multiplies)
    _count(monkeypatch, "run_in_turn", taken)
    sound = grouped_product()
    assert sound is not None
    monkeypatch.setattr("hypic.engine.layers.moe.grouped_product", lambda: _noted(sound, taken))
    assert torch.allclose(moe(x), expected, rtol=1e-4, atol=1e-5)
    assert taken == ["grouped"] * 2 * grouped
    assert torch.allclose(experts(x, *router(x)), expected_routed, rtol=1e-4, atol=1e-5)
    weights, chosen = router(x)
    assert not torch.allclose(experts(x, weights, chosen.roll(1, 0)), expected_routed, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Experts, UngatedExperts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("width", [24, 23])
def test_no_step_on_a_gpu_asks_the_host(kind: type[Experts], dtype: torch.dtype, count: int, width: int) -> None:
    """What a captured graph gives for other tokens than it was captured with is what the experts give in turn."""
    experts = filled(kind(EXPERTS, HIDDEN, width), dtype).cuda()
    router = filled(SoftmaxRouter(EXPERTS, TOP_K, HIDDEN), dtype).cuda()
    moe, x = MoE(router, experts).eval(), tokens(count, dtype).cuda()
    assert experts.asks_no_host(x)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    moe(given)
    with torch.cuda.graph(graph):
        out = moe(given)
    given.copy_(x)
    graph.replay()
    weights, chosen = router(x)
    order = chosen.flatten().long().argsort(stable=True)
    ends = torch.bincount(chosen.flatten().long(), minlength=EXPERTS).cumsum(0)
    rows = experts.double().run_in_turn(x.double()[order // TOP_K], ends)
    expected = torch.zeros_like(x.double()).index_add_(
        0, order // TOP_K, rows * weights.flatten()[order, None].double()
    )
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def _noted(sound: Callable[..., Tensor], taken: list[str]) -> Callable[..., Tensor]:
    def noted(*args: Tensor, **options: Tensor) -> Tensor:
        taken.append("grouped")
        return sound(*args, **options)

    return noted


def _count(patch: pytest.MonkeyPatch, name: str, taken: list[str]) -> None:
    sound: Callable[..., Tensor] = getattr(Experts, name)

    def counted(self: Experts, *args: Tensor) -> Tensor:
        taken.append(name)
        return sound(self, *args)

    patch.setattr(Experts, name, counted)
