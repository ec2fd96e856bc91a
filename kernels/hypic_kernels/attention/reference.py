"""What ``attend`` means: softmax attention of tokens to the keys of their chain, turned where they stand.

Plain torch, any device and floating type; the definition that the kernel is tested against. Not fast: it visits every
chain from Python, gathers its keys, and waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.attention.plan import Plan

QUERIES_AT_ONCE = 256


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    out: Tensor,
    is_latent: bool = False,
) -> None:
    """Writes the rows of ``out`` that a tile names. Arguments as in ``hypic_kernels.attention``.

    Computes in float32, or in float64 where ``out`` is, and rounds at the end alone: rotated keys and queries and the
    weights of values stay as they are computed.
    """
    dtype = torch.promote_types(out.dtype, torch.float32)
    for chain, tokens in _tokens_of_chains(plan):
        start, last = int(plan.starts[chain]), int(plan.positions[tokens].max())
        length = min(int(plan.lengths[chain]), last + 1)
        indices = torch.arange(length, device=q.device)
        turns = indices if plan.key_positions is None else plan.key_positions[start : start + length].long()
        slots = plan.slots[start : start + length].long()
        chain_values = values[slots].to(dtype)
        chain_keys = rotated(keys[slots].to(dtype), turns, cos, sin)
        for part in torch.split(tokens, QUERIES_AT_ONCE):
            positions = plan.positions[part].long()
            wanted = _queries(q[part].to(dtype), positions, cos, sin, values.shape[2] if is_latent else 0)
            all_keys = torch.cat([chain_values, chain_keys], dim=-1) if is_latent else chain_keys
            seen = indices <= positions[:, None]
            out[part] = _mixed(wanted, all_keys, chain_values, seen, scale).to(out.dtype)


def rotated(x: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """``x [n, H, D]`` turned by ``positions [n]``; channel ``i`` pairs with ``i + rot/2``."""
    if cos is None or sin is None:
        return x
    half = cos.shape[1]
    c, s = (table[positions][:, None].to(x.dtype) for table in (cos, sin))
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * c - second * s, second * c + first * s, x[..., 2 * half :]], dim=-1)


def _tokens_of_chains(plan: Plan) -> list[tuple[int, Tensor]]:
    found: dict[int, list[int]] = {}
    tiles = zip(plan.tile_chain.tolist(), plan.tile_first.tolist(), plan.tile_count.tolist(), strict=True)
    for chain, first, count in tiles:
        if count:
            found.setdefault(chain, []).extend(range(first, first + count))
    device = plan.slots.device
    return [(chain, torch.tensor(tokens, device=device)) for chain, tokens in sorted(found.items())]


def _queries(q: Tensor, positions: Tensor, cos: Tensor | None, sin: Tensor | None, latent_dim: int) -> Tensor:
    """Turned; of a latent's queries the channels behind ``latent_dim``."""
    return torch.cat([q[..., :latent_dim], rotated(q[..., latent_dim:], positions, cos, sin)], dim=-1)


def _mixed(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """``q [n, H, D]``, ``keys [L, Hkv, D]``, ``values [L, Hkv, V]``, ``seen [n, L]`` -> ``[n, H, V]``; 0 where nothing
    is seen."""
    num, heads, _ = q.shape
    grouped = q.view(num, keys.shape[1], heads // keys.shape[1], -1)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, keys) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    weights = torch.where(seen.any(dim=-1, keepdim=True), weights, 0.0)
    return torch.einsum("kgnl,lkv->nkgv", weights, values).reshape(num, heads, -1)
