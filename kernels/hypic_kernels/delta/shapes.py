"""Checks of shapes, types and layouts before a launch: what a kernel cannot address is refused in words."""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.compose.chains import Chains
from hypic_kernels.delta.layout import CHUNK_SIZES
from hypic_kernels.delta.rule import DeltaError, GatedNorm, Maps, Rule
from hypic_kernels.rows import Rows


def fits(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """The last axis must lie side by side; other axes may have any stride."""
    if tensor.shape != shape:
        raise DeltaError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}.")
    if dtype is not None and tensor.dtype != dtype:
        raise DeltaError(f"{name} is {tensor.dtype}; it must be {dtype}.")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise DeltaError(f"{name} has stride {tensor.stride(-1)} in its last axis, not 1; call .contiguous() first.")


def check_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rule: Rule) -> None:
    if k.ndim != 3 or v.ndim != 3:
        raise DeltaError(f"k {list(k.shape)} and v {list(v.shape)} must be [N, Hk, K] and [N, Hv, V].")
    num_tokens, num_heads, _ = v.shape
    if num_heads % k.shape[1]:
        raise DeltaError(f"{num_heads} value heads cannot share {k.shape[1]} key heads evenly.")
    fits("q", q, k.shape, k.dtype)
    fits("k", k, (num_tokens, *k.shape[1:]), v.dtype)
    fits("v", v, v.shape)
    for name, tensor in (("g", g), ("beta", beta)):
        if tensor.shape != (num_tokens, num_heads):
            raise DeltaError(f"{name} has shape {list(tensor.shape)}; it must be {[num_tokens, num_heads]}.")
    if rule.A_log is not None and rule.dt_bias is not None:
        fits("rule.A_log", rule.A_log, (num_heads,))
        fits("rule.dt_bias", rule.dt_bias, (num_heads,))


def check_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise DeltaError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be contiguous int32 {list(shape)}.")


def check_chunks(chunks: Tensor) -> None:
    if chunks.ndim != 2 or chunks.shape[1] not in CHUNK_SIZES:
        raise DeltaError(f"chunks has shape {list(chunks.shape)}; it must be [M, C] with C one of {CHUNK_SIZES}.")
    check_integers("chunks", chunks, chunks.shape)


def check_maps(maps: Maps, chunks: Tensor, num_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    num_chunks, size = chunks.shape
    rows_columns = ((key_dim, key_dim), (key_dim, value_dim), (size, key_dim), (size, value_dim))
    for name, tensor, (rows, columns) in zip(Maps._fields, maps, rows_columns, strict=True):
        fits(f"out.{name}", tensor, (num_chunks, num_heads, rows, columns), dtype)
        if not tensor.is_contiguous():
            raise DeltaError(f"out.{name} must be contiguous.")


def check_out(
    out: Tensor, query: Tensor, offset: Tensor, states: Tensor, chunks: Tensor, places: Tensor | None
) -> None:
    num_chunks, size = chunks.shape
    num_heads, key_dim, value_dim = query.shape[1], query.shape[-1], offset.shape[-1]
    fits("query", query, (num_chunks, num_heads, size, key_dim))
    fits("offset", offset, (num_chunks, num_heads, size, value_dim), query.dtype)
    fits("out", out, (out.shape[0], num_heads, value_dim))
    rows = num_chunks if places is None else states.shape[0]
    fits("states", states[:rows], (rows, num_heads, key_dim, value_dim))
    for name, tensor in (("query", query), ("offset", offset), ("states", states)):
        if not tensor.is_contiguous():
            raise DeltaError(f"{name} must be contiguous.")
    if places is not None:
        check_integers("places", places, (num_chunks,))


def check_norm(norm: GatedNorm | None, out: Tensor) -> None:
    if norm is not None:
        fits("norm.z", norm.z, out.shape)
        fits("norm.weight", norm.weight, (out.shape[-1],))


def check_pool(states: Tensor, v: Tensor, k: Tensor, read_slots: Tensor, write_slots: Tensor) -> None:
    num_tokens, num_heads, value_dim = v.shape
    fits("states", states, (states.shape[0], num_heads, k.shape[2], value_dim))
    if not states.is_contiguous():
        raise DeltaError("states must be contiguous.")
    check_integers("read_slots", read_slots, (num_tokens,))
    check_integers("write_slots", write_slots, (num_tokens,))


def check_rows(rows: Rows, initial: Tensor, k: Tensor, v: Tensor, slots: Tensor | None) -> None:
    if rows.fault is not None:
        raise DeltaError(rows.fault)
    fits("initial", initial, (rows.num_rows if slots is None else initial.shape[0], v.shape[1], k.shape[2], v.shape[2]))
    if not initial.is_contiguous():
        raise DeltaError("initial must be contiguous.")
    if slots is not None:
        check_integers("slots", slots, (rows.num_rows,))


def check_into(into: tuple[Tensor, Tensor] | None, rows: Rows, v: Tensor, k: Tensor) -> None:
    if into is not None:
        _check_rows("into", into[0], 0, (v.shape[1], k.shape[2], k.shape[2]))
        check_integers("into[1]", into[1], (rows.num_folds,))


def check_scan(
    k: Tensor,
    v: Tensor,
    chunks: Tensor,
    chains: Chains,
    stored: tuple[Tensor, Tensor] | None,
    initial: Tensor,
    out: Tensor,
    before: Tensor,
    final: Tensor,
    final_slots: Tensor | None,
) -> None:
    (num_tokens, num_heads, value_dim), key_dim = v.shape, k.shape[2]
    num_finals = chains.num_chains if final_slots is None else final.shape[0]
    rows = {"initial": chains.num_initial, "before": chains.num_outputs, "final": num_finals}
    for name, tensor in (("initial", initial), ("before", before), ("final", final)):
        _check_rows(name, tensor, rows[name], (num_heads, key_dim, value_dim))
    fits("out", out, (num_tokens, num_heads, value_dim))
    if chunks.shape[0] < chains.num_states[0]:
        raise DeltaError(f"chains name chunk {chains.num_states[0] - 1}, but there are {chunks.shape[0]}.")
    if stored is None and (chains.num_states[1] or chains.num_transitions[1]):
        raise DeltaError("chains name stored maps, and none are given.")
    for number, tensor in enumerate(stored or ()):
        count = chains.num_states[1] if number else chains.num_transitions[1]
        _check_rows(f"stored[{number}]", tensor, count, (num_heads, key_dim, value_dim if number else key_dim))
    if final_slots is not None:
        check_integers("final_slots", final_slots, (chains.num_chains,))


def _check_rows(name: str, tensor: Tensor, rows: int, shape: tuple[int, ...]) -> None:
    if tensor.shape[1:] != shape or tensor.shape[0] < rows or not tensor.is_contiguous():
        wanted = ", ".join(map(str, shape))
        raise DeltaError(f"{name} is {list(tensor.shape)}; it must be contiguous [at least {rows}, {wanted}].")
