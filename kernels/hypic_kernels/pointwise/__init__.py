"""``pointwise``: what stands between the products of a layer, each in one pass over memory.

``add_rms_norm`` adds a residual and norms the sum, ``silu_mul`` is the middle of a gated feed-forward block, ``heads``
norms and rotates heads, ``gated_group_norm`` stands before an output projection. The definitions are ``reference.py``.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.pointwise import reference
from hypic_kernels.pointwise.check import GateVariant, HeadsVariant, NormVariant, SiluVariant
from hypic_kernels.trust import is_trusted

__all__ = ["Backend", "PointwiseError", "add_rms_norm", "gated_group_norm", "heads", "silu_mul"]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)
# Each is made once: all layers of a kind ask with the same.
_norm_variant = functools.cache(NormVariant)
_gate_variant = functools.cache(GateVariant)
_silu_variant = functools.cache(SiluVariant)


class PointwiseError(ValueError):
    """Tensors that do not fit each other, or that the kernel cannot address."""


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    is_zero_centred: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """``total = x + residual`` and ``normed = total / sqrt(mean(total^2) + eps) * weight``: ``(normed, total)``.

    All ``[N, size]``, rows of any pitch; ``weight [size]``, or ``1 + weight`` if it ``is_zero_centred``. Without a
    residual ``total`` is ``x`` itself. The sum is rounded to the type of ``x``, then normed in float32.

    Raises:
        PointwiseError: shapes or types differ, or rows do not lie side by side.
    """
    _check(x, residual, "residual")
    if tuple(weight.shape) != tuple(x.shape[1:]) or not weight.is_contiguous():
        raise PointwiseError(f"weight has shape {list(weight.shape)}; it must be contiguous {list(x.shape[1:])}.")
    variant = _norm_variant(x.device, x.dtype, weight.dtype, x.shape[1], residual is not None, is_zero_centred)
    if not _takes_kernel(backend, (x, weight) if residual is None else (x, residual, weight)) or not (
        backend == "triton" or is_trusted(variant)
    ):
        return reference.add_rms_norm(x, residual, weight, eps, is_zero_centred)
    from hypic_kernels.pointwise import triton as kernel

    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    kernel.add_rms_norm(x, residual, weight, eps, is_zero_centred, normed, total).run()
    return normed, total


def silu_mul(gate: Tensor, up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``silu(gate) * up``, ``[N, size]``, in float32 and rounded once; both may be halves of one wider product.

    Raises:
        PointwiseError: shapes or types differ, or rows do not lie side by side.
    """
    _check(gate, up, "up")
    variant = _silu_variant(gate.device, gate.dtype, gate.shape[1])
    if not _takes_kernel(backend, (gate, up)) or not (backend == "triton" or is_trusted(variant)):
        return reference.silu_mul(gate, up)
    from hypic_kernels.pointwise import triton as kernel

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    kernel.silu_mul(gate, up, out).run()
    return out


def heads(
    x: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    is_zero_centred: bool = False,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Heads of ``x [N, H, D]``, of any strides but the last, normed and rotated: contiguous, in the type of ``x``.

    With ``weight [D]`` each head becomes ``x / sqrt(mean(x^2) + eps) * weight`` (``1 + weight`` if it
    ``is_zero_centred``). With ``cos, sin [N, R]`` channel ``i`` is then rotated with channel ``i + R``, ``i < R``.
    Computed in float32 and rounded once.

    Raises:
        PointwiseError: shapes do not fit, or numbers of a head do not lie side by side.
    """
    _check_heads(x, weight, cos, sin)
    tensors = tuple(tensor for tensor in (x, weight, cos, sin) if tensor is not None)
    variant = HeadsVariant.of(x, weight, is_zero_centred, cos)
    if not _takes_kernel(backend, tensors) or not (backend == "triton" or is_trusted(variant)):
        return reference.heads(x, weight, eps, is_zero_centred, cos, sin)
    from hypic_kernels.pointwise import heading as kernel

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel.heads(x, weight, eps, is_zero_centred, cos, sin, out).run()
    return out


def gated_group_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    num_groups: int,
    eps: float,
    silu: bool = False,
    gates_first: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """``rms(x) * weight * sigmoid(gate)``, the norm over each of ``num_groups`` equal parts of the last axis.

    ``x, gate [N, size]``, rows of any pitch, the result in the type of ``gate``; ``weight [size]``. With ``silu``
    that is the gate's activation; with ``gates_first`` the norm is of ``x`` times the gate. Computed in float32,
    rounded once.

    Raises:
        PointwiseError: shapes do not fit, or rows do not lie side by side.
    """
    if x.ndim != 2 or gate.shape != x.shape or tuple(weight.shape) != tuple(x.shape[1:]) or x.shape[1] % num_groups:
        shapes = f"x {list(x.shape)}, gate {list(gate.shape)} and weight {list(weight.shape)}"
        raise PointwiseError(f"{shapes} must be [N, size], [N, size] and [size], of {num_groups} equal parts.")
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in (x, gate, weight)):
        raise PointwiseError("numbers of a row must lie side by side; call .contiguous() first.")
    variant = _gate_variant(x.device, x.dtype, gate.dtype, weight.dtype, x.shape[1], num_groups, silu, gates_first)
    if not _takes_kernel(backend, (x, gate, weight)) or not (backend == "triton" or is_trusted(variant)):
        return reference.gated_group_norm(x, gate, weight, num_groups, eps, silu, gates_first)
    from hypic_kernels.pointwise import heading as kernel

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    kernel.gated_group_norm(x, gate, weight, num_groups, eps, silu, gates_first, out).run()
    return out


def _check_heads(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    if x.ndim != 3 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        raise PointwiseError(f"x {list(x.shape)} must be [N, H, D], with the numbers of a head side by side.")
    if weight is not None and (tuple(weight.shape) != tuple(x.shape[2:]) or not weight.is_contiguous()):
        raise PointwiseError(f"weight has shape {list(weight.shape)}; it must be contiguous {list(x.shape[2:])}.")
    if (cos is None) != (sin is None):
        raise PointwiseError("a rotation takes both cosines and sines; one of them is None.")
    if cos is not None and sin is not None and (
        cos.shape != sin.shape or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[2]
        or cos.stride() != sin.stride() or cos.stride(-1) != 1 or cos.dtype != sin.dtype
    ):  # fmt: skip
        raise PointwiseError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must be alike, [N, R], of {list(x.shape)}."
        )


def _check(x: Tensor, other: Tensor | None, name: str) -> None:
    if x.ndim != 2 or not x.shape[1]:
        raise PointwiseError(f"a tensor has shape {list(x.shape)}; it must be [N, size].")
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
        wanted = f"{x.dtype} {list(x.shape)}"
        raise PointwiseError(f"{name} is {other.dtype} {list(other.shape)}; it must be {wanted}.")
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in (x, x if other is None else other)):
        raise PointwiseError("numbers of a row must lie side by side; call .contiguous() first.")


def _takes_kernel(backend: Backend, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the kernel is asked for, or ``auto`` may mean it: CUDA, types that it reads, no gradient."""
    if backend != "auto":
        return backend == "triton"
    if not tensors[0].is_cuda or not available() or interpreted():
        return False
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and all(tensor.dtype in STORAGE for tensor in tensors)
