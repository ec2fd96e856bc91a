"""``decay``: long rows of linear attention with one decay a head, from their states and on to their states.

``S_t = a_t S_{t-1} + k_t v_t^T`` and ``o_t = S_t^T q_t`` with ``a_t = exp(g_t)``: Lightning (arXiv 2401.04658), RetNet
(arXiv 2307.08621), simple GLA (arXiv 2312.06635) and Mamba-2 (arXiv 2405.21060). A row is walked in chunks of 64 tokens
with the state in registers; then all chunks are read at once. The definition is ``reference.py``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.decay import reference
from hypic_kernels.decay.check import TOLERANCE, Precision, Variant
from hypic_kernels.rows import Rows
from hypic_kernels.trust import is_trusted

__all__ = ["TOLERANCE", "Backend", "DecayError", "Precision", "run", "runs_here"]

Backend = Literal["auto", "triton", "reference"]
INSTEAD = "Long rows are lifted to maps, or run by the reference."
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


class DecayError(ValueError):
    """Tensors that do not fit each other, or that the kernel cannot address."""


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    rows: Rows,
    initial: Tensor,
    out: Tensor,
    *,
    precision: Precision = "tf32x3",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Rows of tokens, each from its own state: final states ``[R, Hv, K, V]`` and decays of whole rows ``[R, Hv]``.

    ``q, k [N, Hk, K]``, ``v [N, Hv, V]`` (numbers of a head side by side), ``g [N, Hv]``, at most zero; value head
    ``j`` uses key head ``j // (Hv / Hk)``. ``rows`` names the tokens; ``initial [R, Hv, K, V]`` are the states before.
    Outputs go to the rows of ``out [N, Hv, V]`` that are named, of any floating type; others are left as they are.
    States are float32 (float64 by the reference, if an input is). With ``d`` the decay of a row, its end state alone is
    ``final - d initial``.

    ``precision`` of products: ``"ieee"``, ``"tf32x3"``, or ``"bf16x3"``, which carries 16 bits. ``"auto"`` takes the
    kernel for CUDA tensors where its self-check passes, the reference otherwise and where a gradient or float64 is
    asked for.

    Raises:
        DecayError: shapes or types do not fit.
    """
    _check(q, k, v, g, rows, initial, out)
    variant = Variant(v.device, q.dtype, v.dtype, v.shape[1] // k.shape[1], k.shape[2], v.shape[2], precision)
    if backend == "triton" or (backend == "auto" and _takes_kernel((q, k, v, g, initial)) and _is_right(variant)):
        from hypic_kernels.decay import triton as kernel

        return kernel.run(q, k, v, g, rows, initial, out, precision)
    plain, final, decays = reference.run(q, k, v, g, rows, initial)
    out.index_copy_(0, rows.tokens.long(), plain.to(out.dtype))
    return final, decays


def runs_here(key_dim: int, value_dim: int, device: torch.device) -> bool:
    """Whether ``run`` has a kernel that is right on a random problem; it is tried once."""
    known = torch.empty(0, device=device).device  # "cuda" has a number
    if known.type != "cuda" or not available() or interpreted():
        return False
    return _is_right(Variant(known, torch.float32, torch.float32, 1, key_dim, value_dim, "tf32x3"))


def _is_right(variant: Variant) -> bool:
    return is_trusted(variant, INSTEAD)


def _takes_kernel(tensors: tuple[Tensor, ...]) -> bool:
    if not tensors[0].is_cuda or not available() or interpreted():
        return False
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and all(tensor.dtype in STORAGE for tensor in tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: Rows, initial: Tensor, out: Tensor) -> None:
    if k.ndim != 3 or v.ndim != 3 or v.shape[1] % k.shape[1]:
        raise DecayError(f"k {list(k.shape)} and v {list(v.shape)} must be [N, Hk, K] and [N, Hv, V], Hk dividing Hv.")
    num_tokens, num_heads, value_dim = v.shape
    states = (rows.num_rows, num_heads, k.shape[2], value_dim)
    shapes = (
        *(("q", q, tuple(k.shape)), ("k", k, (num_tokens, *k.shape[1:])), ("g", g, (num_tokens, num_heads))),
        *(("initial", initial, states), ("out", out, tuple(v.shape))),
    )
    for name, tensor, shape in shapes:
        if tuple(tensor.shape) != shape:
            raise DecayError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}.")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise DecayError(f"{name} has stride {tensor.stride(-1)} in its last axis, not 1; call .contiguous().")
    if not initial.is_contiguous():
        raise DecayError("initial must be contiguous.")
