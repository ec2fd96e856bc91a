"""``run``: long rows of the gated delta rule, chunk after chunk, from their states and on to their states."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.delta import chunked, reference
from hypic_kernels.delta.backend import Backend, takes_kernel
from hypic_kernels.delta.check import RunVariant, SettleVariant
from hypic_kernels.delta.rule import DeltaError, GatedNorm, Rule, state_dtype
from hypic_kernels.delta.shapes import check_into, check_norm, check_rows, check_tokens, fits
from hypic_kernels.rows import Rows
from hypic_kernels.trust import is_trusted

RunBackend = Literal["auto", "fla", "reference"]
INSTEAD = "Long rows are run by this package's own kernels, or by the reference."
# Each is made once: all layers of a kind ask with the same.
_run_variant = functools.cache(RunVariant)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    initial: Tensor,
    out: Tensor,
    *,
    slots: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    rule: Rule = Rule(),
    norm: GatedNorm | None = None,
    backend: RunBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Rows of tokens, each from its own state: states that are kept ``[P + R, Hv, K, V]`` and transitions
    ``[F, Hv, K, K]``.

    Tokens as in ``lift``; ``rows`` names them and says before which of its chunks the state is kept, ``P`` of them, and
    of which chunks the transition is wanted; states after each of the ``R`` rows follow. ``initial [R, Hv, K, V]`` are
    the states before, or a pool in which they are at ``slots [R]`` int32. Outputs go to the rows of ``out [N, Hv, V]``
    that are named, of any floating type, through ``norm``; others are left as they are. Transitions are returned, or
    written ``into`` a pool ``[S, Hv, K, K]`` at slots ``[F]`` int32, which is then returned. States are float32
    (float64 by the reference, if an input is). With ``T`` the transition of some chunks, their end state alone is
    ``end - T start``: see ``settle``.

    fla's kernels, and ours, multiply bfloat16 and add float32, and a state is rounded to bfloat16 wherever it is
    multiplied: errors of some 2^-9 of the result. ``"auto"`` takes them where ``runs_here`` says so, and the reference
    elsewhere.

    Raises:
        DeltaError: shapes or types do not fit, or fla is asked for and cannot run.
    """
    check_tokens(q, k, v, g, beta, rule)
    check_rows(rows, initial, k, v, slots)
    check_into(into, rows, v, k)
    fits("out", out, v.shape)
    check_norm(norm, out)
    variant = _variant(q, v, rule, norm)
    if backend == "fla" and not _could_run(variant):
        raise DeltaError(f"fla's kernels take bfloat16 on a CUDA device, not {q.dtype} on {q.device.type}.")
    if backend == "fla" or (backend == "auto" and _takes_fla(variant, (q, k, v, g, beta))):
        if slots is None:
            slots = torch.arange(rows.num_rows, dtype=torch.int32, device=initial.device)
        return chunked.run(q, k, v, g, beta, rows, (initial, slots), rule, norm, out, into)
    before = initial if slots is None else initial.index_select(0, slots)
    plain, kept, transitions = reference.run(q, k, v, g, beta, rows, before, rule)
    places = rows.tokens[rows.tokens >= 0].long()
    picked = None if norm is None else GatedNorm(norm.z[places], norm.weight, norm.eps)
    out.index_copy_(0, places, reference.normed(plain, picked).to(out.dtype))
    if into is None:
        return kept, transitions
    return kept, into[0].index_copy_(0, into[1].long(), transitions.to(into[0].dtype))


def settle(
    kept: Tensor,
    transitions: tuple[Tensor, Tensor],
    ends: Tensor,
    fold_slots: Tensor,
    writes: tuple[Tensor, Tensor],
    states: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """What ``run`` kept, into slots of ``states [S, Hv, K, V]``; slots and places are int32.

    Fold ``f``, which led from ``kept[ends[f, 0]]`` to ``kept[ends[f, 1]]``, has the transition
    ``transitions[0][transitions[1][f]]``; its end state from nothing, ``kept[end] - T kept[start]``, goes to slot
    ``fold_slots[f]``, products carrying about as many digits as float32. Besides, ``writes``, places in ``kept`` and
    slots, are copied. No slot is named twice.
    """
    dtype = state_dtype(kept, states, transitions[0])
    by_kernel = takes_kernel(backend, dtype, (kept, states, transitions[0]))
    if by_kernel and (backend == "triton" or is_trusted(SettleVariant.of(kept, states))):
        from hypic_kernels.delta import carrying

        carrying.settle(kept, transitions, ends, fold_slots, writes, states).run()
        return
    reference.settle(kept, transitions, ends, fold_slots, writes, states)


def runs_here(
    num_k_heads: int, num_v_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether ``run`` is fast for such a layer: fla is there, and right on a random problem, which is tried once.

    That compiles fla's kernels for these sizes, which takes some seconds at the first start.
    """
    known = torch.empty(0, device=device).device  # "cuda" has a number
    variant = _run_variant(known, dtype, num_k_heads, num_v_heads, key_dim, value_dim, True, True)
    return _could_run(variant) and is_trusted(variant, INSTEAD)


def _variant(q: Tensor, v: Tensor, rule: Rule, norm: GatedNorm | None) -> RunVariant:
    sizes = q.shape[1], v.shape[1], q.shape[2], v.shape[2]
    return _run_variant(v.device, v.dtype, *sizes, rule.A_log is not None, norm is not None)


def _could_run(variant: RunVariant) -> bool:
    if variant.device.type != "cuda" or variant.dtype != torch.bfloat16 or not available() or interpreted():
        return False
    return variant.key_dim <= chunked.MAX_KEY_DIM and chunked.pieces() is not None


def _takes_fla(variant: RunVariant, tensors: tuple[Tensor, ...]) -> bool:
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and _could_run(variant) and is_trusted(variant, INSTEAD)
