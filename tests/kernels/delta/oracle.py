"""The delta rule by a loop over tokens in float64, and lift, read and step compared with it."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.delta import Backend, GatedNorm, Maps, Rule, StepConfig, lift, read, step
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.trust import relative_error

HEAD_DIMS = [(64, 64), (96, 192), (128, 128), (192, 192), (256, 256), (24, 17), (5, 3), (1, 1)]

F32, F64 = torch.float32, torch.float64
Layout = TypeVar("Layout")

# Before 3.7 the interpreter cannot read a loop's bounds from memory where numpy is 2.4 or newer.
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)


# -- the oracle: one token after the other -------------------------------------------------------------------------


def token_inputs(p: Problem, token: int, head: int) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """``q, k [K]``, ``v [V]``, ``a = e^g`` and beta of one token and value head, by the layer's formulas."""
    shared = p.v.shape[1] // p.k.shape[1]
    q, k, v = p.q[token, head // shared].double(), p.k[token, head // shared].double(), p.v[token, head].double()
    g, beta = float(p.g[token, head]), float(p.beta[token, head])
    if p.rule.normalise:
        q, k = (x / math.sqrt(float(x.dot(x)) + p.rule.eps) for x in (q, k))
    if p.rule.A_log is not None and p.rule.dt_bias is not None:
        g = -math.exp(float(p.rule.A_log[head])) * math.log1p(math.exp(g + float(p.rule.dt_bias[head])))
        beta = p.rule.beta_scale / (1 + math.exp(-beta))
    return q * p.rule.scale, k, v, math.exp(g), beta


def advance(p: Problem, token: int, head: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state of one token, in float64."""
    q, k, v, a, beta = token_inputs(p, token, head)
    state = a * state
    state = state + beta * torch.outer(k, v - k @ state)
    return q @ state, state


def starts(p: Problem, head: int, row: int) -> Tensor:
    return p.states[row % len(p.states), head].double()


def walked(p: Problem, lengths: tuple[int, ...]) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs ``[N, H, V]``, and per head the final state of each row, from ``starts``."""
    outputs, finals = torch.empty(p.v.shape, dtype=F64), []
    for head in range(p.v.shape[1]):
        token, ends = 0, []
        for row, length in enumerate(lengths):
            state = starts(p, head, row)
            for _ in range(length):
                outputs[token, head], state = advance(p, token, head, state)
                token += 1
            ends.append(state)
        finals.append(ends)
    return outputs, finals


def composed(p: Problem, shape: Shape, maps: Maps) -> tuple[Tensor, list[list[Tensor]]]:
    """States before the chunks ``[M, H, K, V]`` and finals, by applying the maps one after the other."""
    before = torch.zeros(maps.end_state.shape, dtype=F64)
    finals = []
    for head in range(p.v.shape[1]):
        chunk, ends = 0, []
        for row, length in enumerate(shape.lengths):
            state = starts(p, head, row)
            for _ in range(-(-length // shape.size)):
                before[chunk, head] = state
                state = maps.transition[chunk, head].double() @ state + maps.end_state[chunk, head].double()
                chunk += 1
            ends.append(state)
        finals.append(ends)
    return before, finals


def check_lift(shape: Shape, backend: Backend, limit: float, *, is_raw: bool = True, dtype: torch.dtype = F32) -> None:
    """Lifting, composing and reading gives what the loop gives; padding is the identity; nothing is left unwritten."""
    p = Problem.random(shape, dtype=dtype, is_raw=is_raw)
    given = p.wide() if backend == "reference" else p
    kept = [tensor.clone() for tensor in given.tokens]
    maps = lift(*given.tokens, p.chunks, rule=p.rule, out=given.poisoned(given.q.dtype), backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(given.tokens, kept, strict=True))
    outputs, finals = walked(p, shape.lengths)
    before, ends = composed(p, shape, maps)
    for mine, truth in zip(ends, finals, strict=True):
        assert all(relative_error(one, other) < limit for one, other in zip(mine, truth, strict=True))
    out = torch.full(p.v.shape, math.nan, dtype=given.q.dtype)
    read(maps.query, maps.offset, before.to(given.q.dtype), p.chunks, out, backend=backend, precision="ieee")
    assert relative_error(out, outputs) < limit
    for padding in range(1, shape.padding + 1):
        assert torch.equal(maps.transition[-padding, 0], torch.eye(shape.key_dim, dtype=given.q.dtype))
        assert not maps.end_state[-padding].any() and not maps.query[-padding].any() and not maps.offset[-padding].any()


LIMIT = {"reference": 1e-12, "triton": 3e-6}


# -- reads and single steps ----------------------------------------------------------------------------------------


def check_read(p: Problem, limit: float, *, has_norm: bool, out_dtype: torch.dtype = F32, **kernel: object) -> None:
    """Reading states by place, and the norm, against plain formulas in float64."""
    maps = Maps(*(tensor.float().contiguous() for tensor in p.lifted()))
    places = torch.arange(len(p.chunks), dtype=torch.int32, device=p.q.device) % (len(p.states) + 1) - 1
    out = torch.full(p.v.shape, math.nan, dtype=out_dtype, device=p.q.device)
    norm = p.norm if has_norm else None
    read(maps.query, maps.offset, p.states, p.chunks, out, places=places, norm=norm, backend="triton", **kernel)  # type: ignore[arg-type]
    exact = torch.full(p.v.shape, math.nan, dtype=F64)
    for chunk, place in enumerate(places.tolist()):
        state = p.states[place].double().cpu() if place >= 0 else torch.zeros_like(p.states[0]).double().cpu()
        found = maps.query[chunk].double().cpu() @ state + maps.offset[chunk].double().cpu()
        for index, token in enumerate(p.chunks[chunk].tolist()):
            if 0 <= token < len(exact):
                exact[token] = found[:, index]
    assert relative_error(out.cpu(), gated(exact, p.norm) if has_norm else exact) < limit


def gated(outputs: Tensor, norm: GatedNorm) -> Tensor:
    z, weight = norm.z.double().cpu(), norm.weight.double().cpu()
    scale = (outputs.pow(2).sum(-1, keepdim=True) / outputs.shape[-1] + norm.eps).sqrt()
    return outputs / scale * weight * z / (1 + (-z).exp())


def check_step(
    p: Problem, limit: float, has_norm: bool, backend: Backend, config: StepConfig | None = None, rounds: float = 0.0
) -> None:
    pool, (reads, writes) = p.pool(), p.slots()
    exact, outputs = pool.double().cpu(), torch.empty(p.v.shape, dtype=F64)
    host = replace(p, q=p.q.cpu(), k=p.k.cpu(), v=p.v.cpu(), g=p.g.cpu(), beta=p.beta.cpu(), rule=on_host(p.rule))
    for row, (source, target) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        for head in range(p.v.shape[1]):
            start = pool[source, head].double().cpu() if source >= 0 else torch.zeros(pool.shape[2:], dtype=F64)
            outputs[row, head], after = advance(host, row, head, start)
            if target >= 0:
                exact[target, head] = after
    out = torch.full_like(p.v, math.nan)
    norm = p.norm if has_norm else None
    step(*p.tokens, pool, reads, writes, rule=p.rule, norm=norm, out=out, backend=backend, config=config)
    assert relative_error(pool.cpu(), exact) < limit
    assert relative_error(out.cpu(), gated(outputs, p.norm) if has_norm else outputs) < limit + rounds


def on_host(rule: Rule) -> Rule:
    if rule.A_log is None or rule.dt_bias is None:
        return rule
    return replace(rule, A_log=rule.A_log.cpu(), dt_bias=rule.dt_bias.cpu())
