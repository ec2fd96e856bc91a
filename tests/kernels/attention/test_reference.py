"""The definition against softmax written out number by number, and the public call around it."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic_kernels.attention import HeadDims, LayoutError, attend, attend_latent, plan_of
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.trust import relative_error

DIMS = [
    HeadDims(2, 8, 6, 8),
    HeadDims(1, 8, 8, 4),
    HeadDims(3, 6, 4, 0),
    HeadDims(2, 4, 6, 4, is_latent=True),
    HeadDims(2, 4, 6, 0, is_latent=True),
]
WORK = (Work.last(9, 3), Work(12, ((0, 2), (5, 1), (10, 2))), Work(0, ()), Work.last(1, 1))
TOLERANCE = 1e-12


def turned(x: list[float], position: int, p: Problem) -> list[float]:
    """Pairs as complex numbers, times ``cos + i sin`` of the position."""
    if p.cos is None or p.sin is None:
        return x
    half = p.cos.shape[1]
    pairs = [
        complex(x[i], x[i + half]) * complex(float(p.cos[position, i]), float(p.sin[position, i])) for i in range(half)
    ]
    return [z.real for z in pairs] + [z.imag for z in pairs] + x[2 * half :]


def oracle(p: Problem, chains: list[list[int]], tokens: list[tuple[int, int]], turns: list[list[int]]) -> Tensor:
    """``tokens`` are (chain, position) of every query; scores, exponentials and sums one at a time."""
    out = p.output(torch.float64)
    latent = p.dims.value_dim if p.dims.is_latent else 0
    for n, (chain, position) in enumerate(tokens):
        for head in range(p.q.shape[1]):
            key_head, query = head // p.dims.group, p.q[n, head].tolist()
            query = query[:latent] + turned(query[latent:], position, p)
            weights, rows = [], []
            for j, slot in enumerate(chains[chain][: position + 1]):
                value = p.values[slot, key_head].tolist()
                key = (value if latent else []) + turned(p.keys[slot, key_head].tolist(), turns[chain][j], p)
                weights.append(math.exp(p.scale * sum(a * b for a, b in zip(query, key, strict=True))))
                rows.append([weights[-1] * v for v in value])
            out[n, head] = torch.tensor(
                [sum(column) / sum(weights) for column in zip(*rows, strict=True)], dtype=out.dtype
            )
    return out


def written_out(p: Problem) -> tuple[list[list[int]], list[tuple[int, int]], list[list[int]]]:
    """Chains, tokens and turns of a problem, from its plan's tables."""
    plan, starts, lengths = p.plan, p.plan.starts.tolist(), p.plan.lengths.tolist()
    spans = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    chains = [plan.slots[span].tolist() for span in spans]
    turns = [
        list(range(span.stop - span.start)) if plan.key_positions is None else plan.key_positions[span].tolist()
        for span in spans
    ]
    return chains, [(c, position) for c, work in enumerate(WORK) for position in work.positions], turns


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_reference_is_softmax(dims: HeadDims, is_moved: bool) -> None:
    p = Problem.random(dims, WORK, dtype=torch.float64, is_moved=is_moved, tile=2)
    exact = oracle(p, *written_out(p))
    assert relative_error(p.solve(), exact) < TOLERANCE
    chains, tokens, turns = written_out(p)
    later = [(chain, max(0, position - 1)) for chain, position in tokens]
    assert relative_error(p.solve(), oracle(p, chains, later, turns)) > 100 * TOLERANCE


def test_the_oracle_turns() -> None:
    p = Problem.random(HeadDims(1, 2, 2, 2), WORK, dtype=torch.float64)
    angle = cmath.phase(complex(*turned([1.0, 0.0], 3, p)))
    assert p.cos is not None and math.cos(angle) == pytest.approx(float(p.cos[3, 0]))


def test_by_hand() -> None:
    """Two equal keys share the weight; the third lies behind the token."""
    plan = plan_of([(np.array([4, 2, 0]), np.array([1]))], tile=1)
    q, keys = torch.zeros(1, 1, 2), torch.zeros(5, 1, 2)
    values = torch.arange(5.0).view(5, 1, 1)
    assert attend(q, keys, values, plan, scale=1.0).tolist() == [[[3.0]]]


def test_attention_is_to_placed_keys() -> None:
    """Moving a whole chain, queries included, changes nothing: scores depend on distances alone."""
    p = Problem.random(HeadDims(2, 8, 8, 8), [Work.last(9, 3)], dtype=torch.float64)
    half = p.dims.half
    angles = torch.arange(64).double()[:, None] * 0.7 ** torch.arange(1, half + 1)
    at = {k: replace(p, cos=(angles + k * angles[1]).cos(), sin=(angles + k * angles[1]).sin()) for k in (0, 20)}
    assert relative_error(at[0].solve(), at[20].solve()) < 1e-10


def test_rows_that_no_tile_names_are_left_alone() -> None:
    p = Problem.random(HeadDims(2, 8, 8, 0), WORK, spare=2)
    out = torch.full_like(p.q, 7.0)
    result = attend(*p.arguments[:4], scale=p.scale, out=out)
    assert result is out and bool((out[-2:] == 7).all()) and not bool((out[:-2] == 7).any())


def test_a_token_that_sees_nothing_gets_zeros() -> None:
    plan = plan_of([(np.array([], dtype=np.int64), np.array([0, 1]))], tile=4)
    out = attend(torch.ones(2, 2, 4), torch.full((3, 1, 4), math.nan), torch.full((3, 1, 4), math.nan), plan, scale=1.0)
    assert out.tolist() == torch.zeros(2, 2, 4).tolist()


def test_gradients_pass_through() -> None:
    p = Problem.random(HeadDims(2, 8, 8, 8), WORK)
    q = p.q.clone().requires_grad_()
    out = attend(q, p.keys, p.values, p.plan, cos=p.cos, sin=p.sin, scale=p.scale)
    (gradient,) = torch.autograd.grad(out.nan_to_num().sum(), q)
    assert float(gradient.abs().sum()) > 0


def test_strided_views_will_do() -> None:
    """As a query that lies beside its gate, and heads cut out of a wider tensor."""
    p = Problem.random(HeadDims(2, 8, 8, 8), WORK)
    wide = torch.cat([p.q, p.q + 1], dim=-1)
    keys = torch.cat([p.keys, p.keys], dim=-1)
    given = attend(wide[..., :8], keys[..., 8:], p.values, p.plan, cos=p.cos, sin=p.sin, scale=p.scale)
    assert torch.equal(given, attend(p.q, p.keys, p.values, p.plan, cos=p.cos, sin=p.sin, scale=p.scale))


def test_latents_are_keys_and_values() -> None:
    """The same numbers as plain attention with whole keys put together, of which the last channels turn."""
    p = Problem.random(HeadDims(3, 4, 6, 4, is_latent=True), WORK, dtype=torch.float64, num_key_heads=1)
    q = torch.cat([p.q[..., 6:], p.q[..., :6]], dim=-1)
    keys = torch.cat([p.keys, p.values], dim=-1)
    plain = attend(q, keys, p.values, p.plan, cos=p.cos, sin=p.sin, scale=p.scale)
    latent = attend_latent(p.q, p.keys, p.values, p.plan, cos=p.cos, sin=p.sin, scale=p.scale)
    assert relative_error(latent, plain) < TOLERANCE


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(4, 3, 8)}, "share"),
    ({"q": torch.zeros(4, 2, 6)}, "channels"),
    ({"q": torch.zeros(5, 2, 8)}, "plan for as many"),
    ({"keys": torch.zeros(9, 2, 8, dtype=torch.float16)}, "one type"),
    ({"keys": torch.zeros(8, 2, 8)}, "slots or heads"),
    ({"keys": torch.zeros(8, 9, 2).permute(1, 2, 0)}, "without gaps"),
    ({"out": torch.zeros(4, 2, 7)}, "must be"),
    ({"cos": torch.zeros(9, 4)}, "belong together"),
    ({"cos": torch.zeros(9, 4), "sin": torch.zeros(9, 4, dtype=torch.float64)}, "float32"),
    ({"cos": torch.zeros(9, 8), "sin": torch.zeros(9, 8)}, "turn 16"),
    ({"scale": 0.0}, "above 0"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    plan = plan_of([(np.arange(9), np.arange(5, 9))], tile=4)
    good: dict[str, Any] = {
        "q": torch.zeros(4, 2, 8),
        "keys": torch.zeros(9, 2, 8),
        "values": torch.zeros(9, 2, 8),
        "plan": plan,
        "scale": 1.0,
    }
    attend(**good)
    with pytest.raises(LayoutError, match=message):
        attend(**(good | change))
