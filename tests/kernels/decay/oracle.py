"""Decayed attention by a loop over tokens in float64, and chunks and steps compared with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic_kernels.decay import Backend, Maps, StepConfig, lift, read, step
from hypic_kernels.decay.check import Kind
from hypic_kernels.decay.problem import Problem, Shape
from hypic_kernels.trust import relative_error

F64 = torch.float64
LIMIT = {"reference": 1e-12, "triton": 3e-6}

PREPARED: dict[str, dict[str, Any]] = {
    "ring": {"num_turned": 4},
    "minimax": {"has_norm": False, "silu": True},
    "all turned": {"num_turned": 8, "has_norm": False, "is_fixed": False},
    "all": {"num_turned": 3, "silu": True, "is_fixed": False},
    "plain": {"has_norm": False, "is_fixed": False},
}
prepared = pytest.mark.parametrize("features", PREPARED.values(), ids=PREPARED)


# -- the oracle: one token after the other -------------------------------------------------------------------------


def head_of(p: Problem, x: Tensor, weight: Tensor | None, token: int) -> Tensor:
    """q or k ``[K]`` as the recurrence takes it, by the layer's formulas and one pair of channels after the other."""
    x = x.double()
    if p.rule.silu:
        x = x / (1 + (-x).exp())
    if weight is not None:
        x = x / math.sqrt(float(x.dot(x)) / len(x) + p.rule.eps) * weight.double()
    if p.rule.cos is not None and p.rule.sin is not None:
        x, half = x.clone(), p.rule.cos.shape[1]
        for pair in range(half):
            cos, sin = float(p.rule.cos[token, pair]), float(p.rule.sin[token, pair])
            one, other = float(x[pair]), float(x[pair + half])
            x[pair], x[pair + half] = one * cos - other * sin, other * cos + one * sin
    return x


def advance(p: Problem, token: int, head: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state of one token, in float64."""
    shared = head // (p.v.shape[1] // p.k.shape[1])
    q = head_of(p, p.q[token, shared], p.rule.q_weight, token) * p.rule.scale
    k, v = head_of(p, p.k[token, shared], p.rule.k_weight, token), p.v[token, head].double()
    if p.rule.silu:
        v = v / (1 + (-v).exp())
    state = math.exp(float(p.g[token, head])) * state + torch.outer(k, v)
    return q @ state, state


def walked(p: Problem, lengths: tuple[int, ...]) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs ``[N, H, V]``, and per head the final state of each row, which starts from the state of its number."""
    outputs, finals = torch.empty(p.v.shape, dtype=F64), []
    for head in range(p.v.shape[1]):
        token, ends = 0, []
        for row, length in enumerate(lengths):
            state = p.states[row, head].double()
            for _ in range(length):
                outputs[token, head], state = advance(p, token, head, state)
                token += 1
            ends.append(state)
        finals.append(ends)
    return outputs, finals


def composed(p: Problem, shape: Shape, maps: Maps) -> tuple[Tensor, list[list[Tensor]]]:
    """States before the chunks ``[M, H, K, V]`` and finals, by applying the maps one after the other."""
    before, finals = torch.zeros(maps.end_state.shape, dtype=F64), []
    for head in range(p.v.shape[1]):
        chunk, ends = 0, []
        for row, length in enumerate(shape.lengths):
            state = p.states[row, head].double()
            for _ in range(-(-length // shape.size)):
                before[chunk, head] = state
                state = float(maps.transition[chunk, head]) * state + maps.end_state[chunk, head].double()
                chunk += 1
            ends.append(state)
        finals.append(ends)
    return before, finals


def check_chunks(shape: Shape, backend: Backend, limit: float) -> None:
    """Lifting, composing and reading gives what the loop gives; nothing of a chunk without tokens is written."""
    p = Problem.random(shape)
    given = p.wide() if backend == "reference" else p
    kept = [tensor.clone() for tensor in given.tokens]
    maps = lift(given.k, given.v, given.g, p.chunks, rule=given.rule, out=given.poisoned(given.q.dtype),
                backend=backend)  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(given.tokens, kept, strict=True))
    outputs, finals = walked(p, shape.lengths)
    before, ends = composed(p, shape, maps)
    for mine, truth in zip(ends, finals, strict=True):
        assert all(relative_error(one, other) < limit for one, other in zip(mine, truth, strict=True))
    before[~p.is_used] = math.nan
    out = torch.full(p.v.shape, math.nan, dtype=given.q.dtype)
    read(*given.tokens, before.to(given.q.dtype), p.chunks, out, rule=given.rule, backend=backend, precision="ieee")
    assert relative_error(out, outputs) < limit


def kind(dtype: torch.dtype, key_dim: int, value_dim: int, **features: Any) -> Kind:
    p = Problem.random(Shape(key_dim, value_dim, 2, 4, **features), dtype=dtype)
    return Kind.of(p.k, p.v, p.rule)


# -- single steps --------------------------------------------------------------------------------------------------


def check_step(p: Problem, limit: float, backend: Backend, config: StepConfig | None = None) -> None:
    pool, (reads, writes) = p.pool(), p.slots()
    exact, outputs = pool.double(), torch.empty(p.v.shape, dtype=F64)
    for row, (source, target) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        for head in range(p.v.shape[1]):
            start = pool[source, head].double() if source >= 0 else torch.zeros(pool.shape[2:], dtype=F64)
            outputs[row, head], after = advance(p, row, head, start)
            if target >= 0:
                exact[target, head] = after
    out = torch.full(p.v.shape, math.nan)
    step(*p.tokens, pool, reads, writes, rule=p.rule, out=out, backend=backend, config=config)
    assert relative_error(pool, exact) < limit and relative_error(out, outputs) < limit
