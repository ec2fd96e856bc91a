"""Checks of shapes, types and layouts before a launch: what a kernel cannot address is refused in words."""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.decay.layout import CHUNK_SIZES
from hypic_kernels.decay.rule import DecayError, Maps, Rule


def fits(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """The last axis must lie side by side; other axes may have any stride."""
    if tensor.shape != shape:
        raise DecayError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}.")
    if dtype is not None and tensor.dtype != dtype:
        raise DecayError(f"{name} is {tensor.dtype}; it must be {dtype}.")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise DecayError(f"{name} has stride {tensor.stride(-1)} in its last axis, not 1; call .contiguous() first.")


def check_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rule: Rule) -> None:
    if k.ndim != 3 or v.ndim != 3:
        raise DecayError(f"k {list(k.shape)} and v {list(v.shape)} must be [N, Hk, K] and [N, Hv, V].")
    num_tokens, num_heads, _ = v.shape
    if num_heads % k.shape[1]:
        raise DecayError(f"{num_heads} value heads cannot share {k.shape[1]} key heads evenly.")
    fits("q", q, k.shape, k.dtype)
    fits("k", k, (num_tokens, *k.shape[1:]), v.dtype)
    fits("v", v, v.shape)
    if g.shape != (num_tokens, num_heads):
        raise DecayError(f"g has shape {list(g.shape)}; it must be {[num_tokens, num_heads]}.")
    _check_rule(rule, k)


def _check_rule(rule: Rule, k: Tensor) -> None:
    if rule.q_weight is not None and rule.k_weight is not None:
        fits("rule.q_weight", rule.q_weight, (k.shape[2],), rule.k_weight.dtype)
        fits("rule.k_weight", rule.k_weight, (k.shape[2],))
    if rule.cos is None or rule.sin is None:
        return
    if 2 * rule.num_turned > k.shape[2] or rule.cos.stride() != rule.sin.stride():
        raise DecayError(
            f"{rule.num_turned} angles turn twice as many channels, of {k.shape[2]}; cos and sin lie alike."
        )
    wanted = (k.shape[0], rule.num_turned)
    fits("rule.cos", rule.cos, wanted)
    fits("rule.sin", rule.sin, wanted, rule.cos.dtype)


def check_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise DecayError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be contiguous int32 {list(shape)}.")


def check_chunks(chunks: Tensor) -> None:
    if chunks.ndim != 2 or chunks.shape[1] not in CHUNK_SIZES:
        raise DecayError(f"chunks has shape {list(chunks.shape)}; it must be [M, C] with C one of {CHUNK_SIZES}.")
    check_integers("chunks", chunks, chunks.shape)


def check_maps(maps: Maps, chunks: Tensor, v: Tensor, key_dim: int, dtype: torch.dtype) -> None:
    num_chunks, num_heads = chunks.shape[0], v.shape[1]
    fits("out.transition", maps.transition, (num_chunks, num_heads), dtype)
    fits("out.end_state", maps.end_state, (num_chunks, num_heads, key_dim, v.shape[2]), dtype)
    if not maps.transition.is_contiguous() or not maps.end_state.is_contiguous():
        raise DecayError("out must be contiguous.")


def check_states(states: Tensor, rows: int, v: Tensor, key_dim: int) -> None:
    if states.shape[0] < rows:
        raise DecayError(f"states has {states.shape[0]} rows; {rows} are read.")
    fits("states", states[:rows], (rows, v.shape[1], key_dim, v.shape[2]))
    if not states.is_contiguous():
        raise DecayError("states must be contiguous.")
