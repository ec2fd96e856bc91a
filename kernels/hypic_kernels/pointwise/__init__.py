"""``pointwise``: what stands between the products of a layer, each in one pass over memory.

``add_rms_norm`` adds a residual and norms the sum, ``silu_mul`` is the middle of a gated feed-forward block. The
definitions are ``reference.py``; both kernels round where a model that runs in the type of ``x`` rounds.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.pointwise import reference
from hypic_kernels.pointwise.check import NormVariant, SiluVariant
from hypic_kernels.trust import is_trusted

__all__ = ["Backend", "PointwiseError", "add_rms_norm", "silu_mul"]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


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
    variant = NormVariant(x.device, x.dtype, weight.dtype, x.shape[1], residual is not None, is_zero_centred)
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
    variant = SiluVariant(gate.device, gate.dtype, gate.shape[1])
    if not _takes_kernel(backend, (gate, up)) or not (backend == "triton" or is_trusted(variant)):
        return reference.silu_mul(gate, up)
    from hypic_kernels.pointwise import triton as kernel

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    kernel.silu_mul(gate, up, out).run()
    return out


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
