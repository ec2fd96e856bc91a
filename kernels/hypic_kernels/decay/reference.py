"""What ``lift``, ``read`` and ``step`` mean: plain torch, any device and floating type, differentiable where it writes
into nothing given.

Decayed linear attention is ``S_t = a_t S_{t-1} + k_t v_t^T`` with one number ``a_t = exp(g_t)`` a head, and
``o_t = S_t^T q_t``; README.md derives the form of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels.decay.rule import Maps, Rule, state_dtype


class Prepared(NamedTuple):
    """``q, k [N, Hv, K]``, ``v [N, Hv, V]``, ``g [N, Hv]``, all of one type."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rule: Rule) -> Prepared:
    """Silu, norms, rotation and scale; key heads are repeated for their value heads."""
    dtype = state_dtype(q, k, v, g)
    q, k, v, g = (tensor.to(dtype) for tensor in (q, k, v, g))
    if rule.silu:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    if rule.q_weight is not None and rule.k_weight is not None:
        q, k = _normed(q, rule.q_weight, rule.eps), _normed(k, rule.k_weight, rule.eps)
    if rule.cos is not None and rule.sin is not None:
        q, k = (_turned(x, rule.cos.to(dtype)[:, None], rule.sin.to(dtype)[:, None]) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    return Prepared(q.repeat_interleave(group, 1) * rule.scale, k.repeat_interleave(group, 1), v, g)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def lift(k: Tensor, v: Tensor, g: Tensor, chunks: Tensor, rule: Rule) -> Maps:
    """Arguments as in ``hypic_kernels.decay.lift``; a chunk's places without a token act as ``k = v = g = 0``."""
    x = Prepared(*(_chunked(tensor, chunks) for tensor in prepare(k, k, v, g, rule)))
    remaining = _decay(x.g)[..., -1, :, None]
    return Maps(x.g.sum(-1).exp(), (x.k * remaining).mT @ x.v)


def read(q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, chunks: Tensor, rule: Rule) -> Tensor:
    """Outputs ``[N, Hv, V]`` of tokens that stand in a chunk; others are NaN."""
    x = Prepared(*(_chunked(tensor, chunks) for tensor in prepare(q, k, v, g, rule)))
    grown = x.q * x.g.cumsum(-1).exp()[..., None]
    outputs = grown @ states[: len(chunks)].to(grown.dtype) + ((x.q @ x.k.mT) * _decay(x.g)) @ x.v
    out = outputs.new_full(tuple(v.shape), torch.nan)
    is_token = (chunks >= 0) & (chunks < len(v))
    out[chunks[is_token].long()] = outputs.transpose(1, 2)[is_token]
    return out


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, read_slots: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, Hv, V]``, and the states ``[N, Hv, K, V]`` after one token each."""
    x = prepare(q, k, v, g, rule)
    state = torch.where((read_slots < 0).view(-1, 1, 1, 1), 0.0, states[read_slots.clamp_min(0).long()])
    state = state.to(x.q.dtype) * x.g.exp()[..., None, None] + x.k[..., :, None] * x.v[..., None, :]
    return (x.q[..., None, :] @ state)[..., 0, :], state


def _chunked(tensor: Tensor, chunks: Tensor) -> Tensor:
    """``[N, H, ...]`` -> ``[M, H, C, ...]``, zero where a chunk has no token."""
    padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
    is_token = (chunks >= 0) & (chunks < len(tensor))
    return padded[torch.where(is_token, chunks, len(tensor)).long()].transpose(1, 2)


def _decay(g: Tensor) -> Tensor:
    """``exp(sum of g over j < l <= i)`` for ``j <= i``, else 0: ``[..., C]`` -> ``[..., C, C]``.

    Summed for every pair, not as a difference of running sums: one very strong decay would blur all that follow it.
    """
    size = g.shape[-1]
    strict = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    spread = torch.where(strict, g[..., :, None], 0.0)
    return torch.where(strict.mT, 0.0, spread.cumsum(-2).exp())
