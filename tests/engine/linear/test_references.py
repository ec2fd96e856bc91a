"""Every family against its definition: chunks, single steps, gradients, and what gates may be."""

from __future__ import annotations

import pkgutil
from dataclasses import fields, replace

import pytest
import torch

from hypic.engine import linear
from hypic.engine.affine import Affine, identity
from hypic.engine.linear.delta import DeltaInputs, GatedDelta, corrected
from hypic.engine.linear.delta_net import DeltaNet, DeltaNetInputs
from hypic.engine.linear.gla import decayed_scores
from hypic.engine.linear.retnet import retention_gates
from tests.engine.linear.definitions import (
    CHUNKS,
    CORRECTED,
    F64,
    FAMILIES,
    HEADS,
    LIMITS,
    Text,
    as_dtype,
    relative,
    state_of,
    text,
)


def test_every_family_has_a_definition_here() -> None:
    assert {module.name for module in pkgutil.iter_modules(linear.__path__)} == set(FAMILIES)


# -- the families ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 16, 33, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_equal_the_definition(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    family, inputs, by_token = FAMILIES[name]
    x, state = text(num_tokens), state_of()
    outputs, after = by_token(x, state)
    lifted = family.lift(as_dtype(inputs(x), dtype))
    assert relative(lifted.read(state.to(dtype)), outputs) < LIMITS[dtype]
    assert relative(lifted.maps.apply(state.to(dtype)), after) < LIMITS[dtype]
    forgetful = Affine(identity(lifted.maps.transition), lifted.maps.end_state)
    assert relative(forgetful.apply(state.to(dtype)), after) > 100 * LIMITS[dtype]
    assert relative(lifted.offset, outputs) > 100 * LIMITS[dtype]


@pytest.mark.parametrize("name", FAMILIES)
def test_single_steps_equal_the_definition(name: str) -> None:
    family, inputs, by_token = FAMILIES[name]
    x, state = text(20), state_of()
    outputs, after = by_token(x, state)
    packed = inputs(x)
    for t in range(20):
        token = type(packed)(**{f.name: getattr(packed, f.name)[:, :, t] for f in fields(packed)})
        out, state = family.step(token, state)
        assert relative(out, outputs[:, :, t]) < LIMITS[F64]
    assert relative(state, after) < LIMITS[F64]


@pytest.mark.parametrize(("slowest", "fastest"), [(0.0, 5.0), (4.9, 5.0), (0.0, 60.0), (0.0, 1e-3), (500.0, 600.0)])
@pytest.mark.parametrize("name", ["gla", "kda"])
def test_gates_per_channel_may_be_strong(name: str, slowest: float, fastest: float) -> None:
    """Down to -5 a token, as bounded gates go, and beyond: nothing overflows or cancels, in float32 too."""
    family, inputs, by_token = FAMILIES[name]
    x, state = text(64, slowest, fastest), state_of()
    outputs, after = by_token(x, state)
    for dtype, limit in LIMITS.items():
        lifted = family.lift(as_dtype(inputs(x), dtype))
        assert all(bool(t.isfinite().all()) for t in (*vars(lifted.maps).values(), lifted.query, lifted.offset))
        assert relative(lifted.read(state.to(dtype)), outputs) < limit
        assert relative(lifted.maps.apply(state.to(dtype)), after) < limit


def test_scores_do_not_lose_weak_gates_behind_strong_ones() -> None:
    """Sums of gates from the chunk's start would be differences of large numbers; here float32 keeps six digits."""
    x = text(64, 0.0, 1e-3)
    x.g[:, :, 5] = -80.0
    single = decayed_scores(*(t.float() for t in (x.q, x.k, x.g)))
    assert relative(single, decayed_scores(x.q, x.k, x.g)) < 1e-6
    running = x.g.float().cumsum(-2)
    naive = (x.q.float()[..., :, None, :] * x.k.float()[..., None, :, :]) * (
        running[..., :, None, :] - running[..., None, :, :]
    ).tril().exp()
    exact = decayed_scores(x.q, x.k, x.g)
    assert relative(naive.sum(-1).tril()[..., 6:, 6:], exact[..., 6:, 6:]) > 1e-6


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_strong_gates_have_finite_gradients(name: str) -> None:
    """Training goes through the same lift."""
    family, inputs, _ = FAMILIES[name]
    x = as_dtype(inputs(text(32, 0.0, 40.0)), torch.float32)
    leaves = [getattr(x, field.name).requires_grad_() for field in fields(x)]
    lifted = family.lift(x)
    (lifted.read(state_of().float()).sum() + lifted.maps.transition.sum()).backward()
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_gradients_are_those_of_the_definition(name: str) -> None:
    family, inputs, by_token = FAMILIES[name]
    x, state, found = text(11), state_of(), []
    for run in (lambda y: by_token(y, state)[0], lambda y: family.lift(inputs(y)).read(state)):
        leaves = Text(*(getattr(x, field.name).clone().requires_grad_() for field in fields(x)))
        run(leaves).square().sum().backward()
        found.append([leaves.q.grad, leaves.k.grad, leaves.v.grad, leaves.g.grad])
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None and theirs is not None and relative(theirs, mine) < LIMITS[F64]


# -- the delta rule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8, 5), (96, 192)])
@pytest.mark.parametrize("name", CORRECTED)
def test_betas_up_to_two_and_uneven_heads(name: str, sizes: tuple[int, int]) -> None:
    """Negative eigenvalues, and OLMo-Hybrid's heads of 96 keys and 192 values."""
    family, inputs, by_token = FAMILIES[name]
    x = text(64, strength=2.0, sizes=sizes)
    state = torch.randn(CHUNKS, HEADS, *sizes, generator=torch.Generator().manual_seed(7), dtype=F64)
    outputs, after = by_token(x, state)
    for dtype, limit in LIMITS.items():
        lifted = family.lift(as_dtype(inputs(x), dtype))
        assert relative(lifted.read(state.to(dtype)), outputs) < limit
        assert relative(lifted.maps.apply(state.to(dtype)), after) < limit
    halved = family.lift(inputs(replace(x, beta=x.beta / 2)))
    assert relative(halved.read(state), outputs) > 100 * LIMITS[torch.float32]


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["random", "few", "equal", "opposed"])
@pytest.mark.parametrize("size", [1, 2, 16, 32, 64])
def test_the_inverse_is_as_good_as_the_solve(size: int, kind: str, strength: float) -> None:
    """Keys in few directions, all equal, or of alternating sign, corrected by all or twice of what stands there."""
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randn(3, 2, size, 3 if kind == "few" else 24, generator=generator, dtype=F64)
    keys = torch.nn.functional.normalize(drawn if kind in ("random", "few") else drawn[..., :1, :] + 0 * drawn, dim=-1)
    keys = keys * (-1.0) ** torch.arange(size)[:, None] if kind == "opposed" else keys
    couplings = strength * (keys @ keys.mT)
    sides = torch.randn(3, 2, size, 7, generator=generator, dtype=F64)
    expected = torch.linalg.solve_triangular(couplings, sides, upper=False, unitriangular=True)
    assert relative(corrected(couplings, sides), expected) < 1e-12
    residual = sides - corrected(couplings, sides) - couplings.tril(-1) @ corrected(couplings, sides)
    assert float(residual.abs().max() / expected.abs().max()) < 1e-12
    single = corrected(couplings.float(), sides.float())
    assert relative(single, expected) < 1e-5
    if size > 2:
        assert relative(sides - couplings.tril(-1) @ sides, expected) > 1e-3, "one term of the series is not enough"


@pytest.mark.parametrize("name", CORRECTED)
def test_gradients_of_corrections_are_those_of_the_definition(name: str) -> None:
    family, inputs, by_token = FAMILIES[name]
    x, state, found = text(11, strength=2.0), state_of(), []
    for run in (lambda y: by_token(y, state)[0], lambda y: family.lift(inputs(y)).read(state)):
        leaves = Text(*(getattr(x, field.name).clone().requires_grad_() for field in fields(x)))
        run(leaves).square().sum().backward()
        found.append([leaves.q.grad, leaves.k.grad, leaves.v.grad, leaves.beta.grad])
    for mine, theirs in zip(*found, strict=True):
        assert mine is not None and theirs is not None and relative(theirs, mine) < LIMITS[F64]


# -- special cases ---------------------------------------------------------------------------------------------------


def test_delta_net_is_the_gated_rule_without_a_gate() -> None:
    x, state = text(33), state_of()
    gated = GatedDelta().lift(DeltaInputs(x.q, x.k, x.v, torch.zeros_like(x.beta), x.beta))
    plain = DeltaNet().lift(DeltaNetInputs(x.q, x.k, x.v, x.beta))
    assert relative(plain.read(state), gated.read(state)) < LIMITS[F64]
    assert relative(plain.maps.transition, gated.maps.transition) < LIMITS[F64]


def test_retention_decays_as_its_paper_has_it() -> None:
    assert relative(retention_gates(8).exp(), 1 - 2.0 ** -torch.arange(5.0, 13.0, dtype=F64)) < 1e-15
    assert relative(retention_gates(8, factor=0.25), retention_gates(8) / 4) < 1e-15
