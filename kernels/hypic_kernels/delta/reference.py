"""What ``lift``, ``read``, ``step`` and ``scan`` mean: plain torch, any device and floating type, differentiable where
they write into nothing given.

The gated delta rule (arXiv 2412.06464) is ``S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`` with
``a_t = exp(g_t)``, and ``o_t = S_t^T q_t``. A chunk of it is one affine map; README.md derives the form used here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels.compose.chains import IDENTITY, ZERO, Chains
from hypic_kernels.delta.rule import GatedNorm, Maps, Rule, state_dtype
from hypic_kernels.rows import CHUNK, Rows


class Prepared(NamedTuple):
    """``q, k [N, Hv, K]``, ``v [N, Hv, V]``, ``g, beta [N, Hv]``, all of one type."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rule: Rule) -> Prepared:
    """Normalises, scales, repeats key heads for their value heads, and computes the gate; float32 at least."""
    dtype = state_dtype(q, k, v, g, beta)
    q, k, v, g, beta = (tensor.to(dtype) for tensor in (q, k, v, g, beta))
    if rule.A_log is not None and rule.dt_bias is not None:
        g = -rule.A_log.to(dtype).exp() * F.softplus(g + rule.dt_bias.to(dtype))
        beta = rule.beta_scale * beta.sigmoid()
    if rule.normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + rule.eps) for x in (q, k))
    group = v.shape[1] // k.shape[1]
    return Prepared(q.repeat_interleave(group, 1) * rule.scale, k.repeat_interleave(group, 1), v, g, beta)


def lift(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Tensor, rule: Rule) -> Maps:
    """Arguments as in ``hypic_kernels.delta.lift``; a chunk's places without a token act as ``beta = g = 0``."""
    x = Prepared(*(_chunked(tensor, chunks) for tensor in prepare(q, k, v, g, beta, rule)))
    decay = _decay(x.g)
    growth, total = x.g.cumsum(-1).exp()[..., None], x.g.sum(-1).exp()[..., None, None]
    remaining = decay[..., -1, :, None]
    couplings = ((x.k @ x.k.mT) * decay * x.beta[..., None]).tril(-1)
    sides = torch.cat([x.v, x.k * growth], dim=-1) * x.beta[..., None]
    corrected = torch.linalg.solve_triangular(couplings, sides, upper=False, unitriangular=True)
    carried = (x.k * remaining).mT @ corrected
    seen = ((x.q @ x.k.mT) * decay) @ corrected
    width = x.v.shape[-1]
    eye = torch.eye(x.k.shape[-1], dtype=x.k.dtype, device=x.k.device)
    return Maps(
        eye * total - carried[..., width:], carried[..., :width], x.q * growth - seen[..., width:], seen[..., :width]
    )


def _chunked(tensor: Tensor, chunks: Tensor) -> Tensor:
    """``[N, H, ...]`` -> ``[M, H, C, ...]``, zero where a chunk has no token."""
    padded = torch.cat(
        [tensor, torch.zeros_like(tensor[:1]) if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])]
    )
    is_token = (chunks >= 0) & (chunks < len(tensor))
    rows = torch.where(is_token, chunks, len(tensor)).long()
    return padded[rows].transpose(1, 2)


def _decay(g: Tensor) -> Tensor:
    """``exp(sum of g over j < l <= i)`` for ``j <= i``, else 0: ``[..., C]`` -> ``[..., C, C]``.

    Summed for every pair, not as a difference of running sums: one very strong decay would blur all that follow it.
    """
    size = g.shape[-1]
    strict = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    spread = torch.where(strict, g[..., :, None], 0.0)
    return torch.where(strict.mT, 0.0, spread.cumsum(-2).exp())


def read(
    query: Tensor, offset: Tensor, states: Tensor, chunks: Tensor, places: Tensor | None, num_tokens: int
) -> Tensor:
    """Outputs ``[N, Hv, V]`` of tokens that stand in a chunk; others are NaN. Without the norm."""
    outputs = query @ _picked(states[: len(query)] if places is None else states, places).to(query.dtype) + offset
    out = query.new_full((num_tokens, *outputs.shape[1:2], outputs.shape[-1]), torch.nan)
    is_token = (chunks >= 0) & (chunks < num_tokens)
    out[chunks[is_token].long()] = outputs.transpose(1, 2)[is_token]
    return out


def _picked(states: Tensor, places: Tensor | None) -> Tensor:
    """States by place, zero for negative places."""
    if places is None:
        return states
    return torch.where((places < 0).view(-1, 1, 1, 1), 0.0, states[places.clamp_min(0).long()])


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, initial: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs ``[n, Hv, V]`` of the rows' tokens in their order, without the norm; states that are kept and
    transitions, as in ``hypic_kernels.delta.run``, from ``initial [R, Hv, K, V]``. Chunks are lifted some at a time and
    walked one by one."""
    chunks, rows_of = _chunks_of(rows), rows.chunk_indices.tolist()
    marks, marked = rows.marks.tolist(), dict[int, Tensor]()
    outputs, steps, ends = list[Tensor](), list[Tensor](), list[Tensor]()
    state = torch.empty(0)
    for part in torch.split(torch.arange(len(chunks)), 64):
        maps = lift(q, k, v, g, beta, chunks[part.to(chunks.device)], rule)
        for number, chunk in enumerate(part.tolist()):
            row, within = rows_of[chunk]
            state = initial[row].to(maps.query.dtype) if within == 0 else state
            marked[marks[chunk]] = state
            steps.append(maps.transition[number])
            outputs.append(maps.query[number] @ state + maps.offset[number])
            state = steps[-1] @ state + maps.end_state[number]
            if chunk + 1 == len(chunks) or rows_of[chunk + 1][0] != row:
                ends.append(state)
    kept = torch.stack([*(marked[mark] for mark in range(rows.num_marks)), *ends])
    folds = [_product(steps[first:end]) for first, end in rows.folds.tolist()]
    transitions = torch.stack(folds) if folds else kept.new_empty((0, *kept.shape[1:3], kept.shape[2]))
    return torch.stack(outputs).transpose(1, 2)[chunks >= 0], kept, transitions


def settle(
    kept: Tensor,
    transitions: tuple[Tensor, Tensor],
    ends: Tensor,
    fold_slots: Tensor,
    writes: tuple[Tensor, Tensor],
    states: Tensor,
) -> None:
    """Arguments as in ``hypic_kernels.delta.settle``."""
    starts, stops = kept[ends.long()].unbind(1)
    alone = stops - transitions[0][transitions[1].long()].to(kept.dtype) @ starts
    states.index_copy_(0, fold_slots.long(), alone.to(states.dtype))
    states.index_copy_(0, writes[1].long(), kept[writes[0].long()].to(states.dtype))


def _product(steps: Sequence[Tensor]) -> Tensor:
    """Of maps in their order, the last from the left."""
    return functools.reduce(lambda product, step: step @ product, steps)


def _chunks_of(rows: Rows) -> Tensor:
    """``[M, CHUNK]``: the tokens of each chunk, -1 where there is none."""
    starts = rows.cu_seqlens[rows.chunk_indices[:, 0].long()] + rows.chunk_indices[:, 1] * CHUNK
    places = starts[:, None] + torch.arange(CHUNK, dtype=torch.int32, device=starts.device)
    inside = places < rows.cu_seqlens[rows.chunk_indices[:, 0].long() + 1][:, None]
    return torch.where(inside, rows.tokens[torch.where(inside, places, 0).long()], -1)


def scan(
    maps: Maps,
    chunks: Tensor,
    chains: Chains,
    stored: tuple[Tensor, Tensor] | None,
    initial: Tensor,
    out: Tensor,
    before: Tensor,
    final: Tensor,
    final_slots: Tensor | None,
) -> None:
    """Arguments as in ``hypic_kernels.delta.scan``, chunks as ``lift`` gives them; one element after the other.

    ``out`` is without the norm; its rows that no chunk of a chain names are left as they are.
    """
    bounds, elements = chains.cu_elements.tolist(), chains.elements.tolist()
    slots = list(range(chains.num_chains)) if final_slots is None else final_slots.tolist()
    for chain, slot in enumerate(chains.initial_index.tolist()):
        state = (torch.zeros_like(initial[0]) if slot == ZERO else initial[slot]).to(maps.query.dtype)
        for source, transition, place, output in elements[bounds[chain] : bounds[chain + 1]]:
            if output >= 0:
                before[output] = state
            if source == 0:
                is_token = (chunks[place] >= 0) & (chunks[place] < len(out))
                outputs = (maps.query[place] @ state + maps.offset[place]).transpose(0, 1).to(out.dtype)
                out[chunks[place][is_token].long()] = outputs[is_token]
                state = maps.transition[place] @ state + maps.end_state[place]
            elif stored is not None:
                state = _acted(stored[0], transition, state) + stored[1][place].to(state.dtype)
        if slots[chain] >= 0:
            final[slots[chain]] = state


def _acted(transitions: Tensor, index: int, state: Tensor) -> Tensor:
    """``T S``; a transition that is zero shuts out whatever the state holds, NaN included."""
    if index == ZERO:
        return torch.zeros_like(state)
    return state if index == IDENTITY else transitions[index].to(state.dtype) @ state


def normed(outputs: Tensor, norm: GatedNorm | None) -> Tensor:
    """``rms(outputs) * weight * silu(z)``, or the outputs themselves."""
    if norm is None:
        return outputs
    mean = outputs.square().mean(-1, keepdim=True)
    gate = F.silu(norm.z.to(outputs.dtype))
    return outputs * torch.rsqrt(mean + norm.eps) * norm.weight.to(outputs.dtype) * gate


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, read_slots: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, Hv, V]`` without the norm, and the states ``[N, Hv, K, V]`` after one token each."""
    x = prepare(q, k, v, g, beta, rule)
    state = _picked(states, read_slots).to(x.q.dtype) * x.g.exp()[..., None, None]
    correction = x.beta[..., None] * (x.v - (x.k[..., None, :] @ state)[..., 0, :])
    state = state + x.k[..., :, None] * correction[..., None, :]
    return (x.q[..., None, :] @ state)[..., 0, :], state
