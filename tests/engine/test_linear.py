"""Families of linear attention: the lift against the recurrence it stands for, and conv tails.

The families are found by listing the folder, so a new one is held to the same laws without being named here.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from hypic.engine.batch import Batch, Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.layers.conv import convolve_rows
from hypic.engine.linear.mamba2 import Mamba2, Mamba2Inputs
from hypic.engine.pool import Layout, LinearShape, Pool
from tests.engine.expected import relative
from tests.engine.lifts import F64, FAMILIES, GATED, HEADS, K, V, as_matrix, draw, joined, mapped, probed, stepped


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 63, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_lift_is_the_probe(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, num_tokens, dtype=dtype)
    lifted = family.lift(x)
    transition, end_state = probed(family, mapped(x, lambda t: t.to(F64)))
    limit = 1e-12 if dtype == F64 else 1e-5
    assert relative(as_matrix(lifted.maps.transition), transition) < limit
    assert relative(lifted.maps.end_state, end_state) < limit


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_is_what_the_recurrence_gives(name: str, num_tokens: int) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, num_tokens)
    state = torch.randn(2, HEADS, K, V, dtype=F64)
    outputs, after = stepped(family, x, state)
    lifted = family.lift(x)
    assert relative(lifted.read(state), outputs) < 1e-12
    assert relative(lifted.maps.apply(state), after) < 1e-12
    assert relative(lifted.read(torch.zeros_like(state)), outputs) > 1e-3, "the state must matter"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lift_of_a_text_is_that_of_its_parts_in_order(name: str) -> None:
    family = FAMILIES[name][0]
    for first, second in ((1, 1), (8, 56), (30, 34), (63, 1)):
        x, y = draw(name, 2, first, seed=1), draw(name, 2, second, seed=2)
        whole, parts = family.lift(joined(x, y)).maps, family.lift(x).maps.then(family.lift(y).maps)
        assert relative(parts.transition, whole.transition) < 1e-12
        assert relative(parts.end_state, whole.end_state) < 1e-12
        swapped = family.lift(y).maps.then(family.lift(x).maps)
        assert relative(swapped.end_state, whole.end_state) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_of_texts_may_be_grouped_as_one_likes(name: str) -> None:
    family = FAMILIES[name][0]
    x, y, z = (family.lift(draw(name, 2, 9, seed=seed)).maps for seed in (1, 2, 3))
    left, right = x.then(y).then(z), x.then(y.then(z))
    assert relative(left.transition, right.transition) < 1e-12 and relative(left.end_state, right.end_state) < 1e-12
    assert relative(x.then(z).then(y).end_state, right.end_state) > 1e-3, "their order must matter"


@pytest.mark.parametrize("name", FAMILIES)
def test_scanning_a_text_is_scanning_its_parts_in_order(name: str) -> None:
    family, state = FAMILIES[name][0], torch.randn(2, HEADS, K, V, dtype=F64)
    x, y = draw(name, 2, 21, seed=1), draw(name, 2, 43, seed=2)
    whole, first, second = family.lift(joined(x, y)), family.lift(x), family.lift(y)
    middle = first.maps.apply(state)
    outputs = torch.cat([first.read(state), second.read(middle)], dim=2)
    assert relative(outputs, whole.read(state)) < 1e-12
    assert relative(second.maps.apply(middle), whole.maps.apply(state)) < 1e-12
    assert relative(second.maps.apply(state), whole.maps.apply(state)) > 1e-3, "the first part must matter"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_of_zeros_is_the_identity(name: str) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, 20)
    padded = mapped(x, lambda t: torch.cat([t, t.new_zeros(*t.shape[:2], 12, *t.shape[3:])], dim=2))
    found, expected = family.lift(padded), family.lift(x)
    state = torch.randn(2, HEADS, K, V, dtype=F64)
    assert relative(found.maps.transition, expected.maps.transition) < 1e-12
    assert relative(found.maps.end_state, expected.maps.end_state) < 1e-12
    assert relative(found.read(state)[:, :, :20], expected.read(state)) < 1e-12
    nothing = family.lift(mapped(x, torch.zeros_like)).maps
    assert torch.equal(as_matrix(nothing.transition), torch.eye(K, dtype=F64).expand(2, HEADS, K, K))
    assert not nothing.end_state.any()


@pytest.mark.parametrize("gate", [-1e-4, -1.0, -30.0, -1000.0])
@pytest.mark.parametrize("name", GATED)
def test_any_decay_is_finite_and_exact_to_the_rounding_of_summed_gates(name: str, gate: float) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, 64)
    x = replace(x, g=torch.full_like(x.g, gate))
    x = replace(x, g=torch.where(torch.rand_like(x.g) < 0.5, x.g, -0.01))
    state = torch.randn(2, HEADS, K, V, dtype=F64)
    for wanted in (F64, torch.float32):
        lifted, (outputs, after) = family.lift(mapped(x, lambda t, d=wanted: t.to(d))), stepped(family, x, state)
        limit = torch.finfo(wanted).eps * (64 + float(x.g.sum(2).abs().max()))
        assert relative(lifted.read(state.to(wanted)), outputs) < limit
        assert relative(lifted.maps.apply(state.to(wanted)), after) < limit


@pytest.mark.parametrize("name", FAMILIES)
def test_lifts_have_gradients(name: str) -> None:
    family, x = FAMILIES[name][0], mapped(draw(name, 1, 20), lambda t: t.requires_grad_())
    lifted = family.lift(x)
    (lifted.read(torch.ones(1, HEADS, K, V, dtype=F64)).sum() + lifted.maps.end_state.sum()).backward()
    for field in fields(x):
        grad = getattr(x, field.name).grad
        assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any())


def test_groups_share_keys_and_queries_in_mamba2() -> None:
    x = draw("mamba2", 2, 20)
    v, g = torch.cat([x.v, x.v[:, :1]], dim=1), torch.cat([x.g, x.g[:, :1]], dim=1)
    grouped = Mamba2Inputs(x.q[:, :2], x.k[:, :2], v, g)
    spread = Mamba2Inputs(*(t[:, :2].repeat_interleave(2, dim=1) for t in (x.q, x.k)), v, g)
    found, expected = Mamba2().lift(grouped), Mamba2().lift(spread)
    assert relative(found.maps.end_state, expected.maps.end_state) < 1e-12
    assert relative(found.query, expected.query) < 1e-12 and relative(found.offset, expected.offset) < 1e-12


@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_short_links_let_the_links_before_them_show_through(width: int) -> None:
    """Links of zero to eight tokens, live or cached: the convolution is that of the text in one piece."""
    channels = 3
    lengths = [(1, None), (3, 2), (4, 2), (9, 4), (1, None), (5, 4), (5, 4), (2, None), (3, 0), (1, None)]
    shape = LinearShape(1, 2, 2, "head", channels, width)
    pool = Pool(Layout((shape,), (), F64, F64), 2**20, 16, 64, 30, torch.device("cpu"))
    weight = torch.randn(channels, 1, width, dtype=F64)
    parts = [torch.randn(num, channels, dtype=F64) for num, _ in lengths]
    none = np.zeros(64, dtype=np.int64)
    chains, links, inputs, rows, run, position = [], [], [], [], [], 0
    for number, ((num, seam), x) in enumerate(zip(lengths, parts, strict=True)):
        live = num if seam is None else seam
        if live:
            links.append(RowLink([0] * live, position, none[:live]))
            rows.append(x[:live])
            run += range(position, position + live)
        if seam is not None:
            head = [RowLink([0] * seam, 0, none[:seam])] if seam else []
            fold = FoldInto(2 + number, number, 0)
            chains.append(
                Chain([*head, RowLink([0] * (num - seam), seam, none[: num - seam], None, fold)], none, 0, 20)
            )
            links.append(InteriorLink(2 + number, number, num - seam, position))
            inputs.append(x)
        position += num
    together = Batch.pack([*chains, Chain(links, none[:position], 0, 1)], width, pool.device)
    x = torch.cat([*inputs, *rows])
    found = convolve_rows(x, weight, together, pool, 0)[together.chain_tokens[-1]]
    text = torch.nn.functional.pad(torch.cat(parts), (0, 0, width - 1, 0))
    expected = torch.nn.functional.conv1d(text.mT[None], weight, groups=channels)[0].mT
    assert relative(found, expected[run]) < 1e-12
    assert relative(pool.tails[0][1], text[-(width - 1) :]) < 1e-12
    # The same again, from tails that were stored before.
    pool.tails[0][1].zero_()
    later = Batch.pack([Chain(links, none[:position], 0, 1)], width, pool.device)
    assert relative(convolve_rows(torch.cat(rows), weight, later, pool, 0), expected[run]) < 1e-12
    assert relative(pool.tails[0][1], text[-(width - 1) :]) < 1e-12
